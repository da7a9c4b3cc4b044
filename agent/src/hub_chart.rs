//! A chart from the hub, for a cluster that has no way to the repository.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use krypton_common::desired::DesiredState;
use krypton_common::fingerprint::sha256_hex;
use krypton_proto::v1::{ChartPart, FetchChartRequest, chart_part};
use tokio::sync::watch;
use tonic::{Status, Streaming};

use crate::chart::{CHART_LIMIT, ChartRef, Fallback};
use crate::dial::Connection;
use crate::effect;
use crate::session::Link;

/// Asks over the session's connection. The hub gives the chart of the present desired state only.
#[derive(Debug)]
pub struct HubChart {
    link: watch::Receiver<Link>,
    desired: watch::Receiver<Option<Arc<DesiredState>>>,
}

impl HubChart {
    pub fn new(
        link: watch::Receiver<Link>,
        desired: watch::Receiver<Option<Arc<DesiredState>>>,
    ) -> Self {
        Self { link, desired }
    }

    async fn get(&self, chart: ChartRef) -> Result<Vec<u8>, String> {
        let digest = {
            let desired = self.desired.borrow();
            let present = desired.as_deref().filter(|desired| is_of(desired, &chart));
            present.map(DesiredState::digest)
        };
        let Some(digest) = digest else {
            return Err("it is not the chart that the hub gives now".to_owned());
        };
        let connection = self.link.borrow().connection().cloned();
        let Some(connection) = connection else {
            return Err("there is no session with the hub".to_owned());
        };
        download(&connection, digest).await
    }
}

impl Fallback for HubChart {
    fn fetch(&self, chart: &ChartRef) -> BoxFuture<'_, Result<Vec<u8>, String>> {
        self.get(chart.clone()).boxed()
    }
}

/// "Newest" may have been given its meaning by now.
fn is_of(desired: &DesiredState, chart: &ChartRef) -> bool {
    let present = &desired.chart;
    (&present.repo, &present.name) == (&chart.repo, &chart.name)
        && (present.version == chart.version || present.version.is_empty())
}

/// The cache sets the deadline.
async fn download(connection: &Connection, digest: String) -> Result<Vec<u8>, String> {
    let words = |status: Status| {
        let words: String = status.message().chars().take(500).collect();
        format!(
            "the hub at {} does not give it: {words}",
            connection.address()
        )
    };
    let request = FetchChartRequest {
        digest,
        have_sha256: String::new(),
    };
    let mut fleet = connection.fleet();
    let answer = effect!("hub-chart.fetch", fleet.fetch_chart(request)).await;
    collect(answer.map_err(words)?.into_inner())
        .await
        .map_err(|problem| match problem {
            Problem::Call(status) => words(*status),
            Problem::Content(problem) => problem.to_owned(),
        })
}

enum Problem {
    Call(Box<Status>),
    Content(&'static str),
}

async fn collect(mut parts: Streaming<ChartPart>) -> Result<Vec<u8>, Problem> {
    let mut next = async || {
        let part = parts.message().await;
        part.map_err(|status| Problem::Call(Box::new(status)))
            .map(|part| part.and_then(|part| part.kind))
    };
    let Some(chart_part::Kind::Head(head)) = next().await? else {
        return Err(Problem::Content("the hub's answer has no head"));
    };
    if head.size > CHART_LIMIT {
        return Err(Problem::Content("the hub's chart is too large"));
    }
    let size = usize::try_from(head.size).unwrap_or(usize::MAX);
    let mut bytes = Vec::with_capacity(size);
    while let Some(part) = next().await? {
        let chart_part::Kind::Chunk(chunk) = part else {
            return Err(Problem::Content("the hub's answer has two heads"));
        };
        if bytes.len() + chunk.len() > size {
            return Err(Problem::Content("the hub's answer is longer than it said"));
        }
        bytes.extend_from_slice(&chunk);
    }
    if bytes.len() != size || sha256_hex(&bytes) != head.sha256 {
        return Err(Problem::Content("the hub's answer came damaged"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use krypton_common::desired::{ChartState, Version};
    use krypton_proto::v1::ChartHead;

    use super::*;
    use crate::fake_hub::{FakeAuthority, FakeHub, Valid};

    fn chart() -> ChartRef {
        ChartRef {
            repo: "https://charts.example.org".to_owned(),
            name: "small".to_owned(),
            version: "1.0.0".to_owned(),
        }
    }

    fn desired() -> DesiredState {
        let ChartRef {
            repo,
            name,
            version,
        } = chart();
        DesiredState {
            version: Version::default(),
            chart: ChartState {
                repo,
                name,
                version,
                install_crds: false,
                values: serde_json::Map::new(),
            },
            paused: false,
            retire: false,
            drift: krypton_common::drift::DriftPolicy::default(),
            chart_crds: krypton_common::crd_policy::CrdPolicy::default(),
        }
    }

    fn head(bytes: &[u8]) -> ChartPart {
        ChartPart {
            kind: Some(chart_part::Kind::Head(ChartHead {
                sha256: sha256_hex(bytes),
                size: bytes.len() as u64,
                version: "1.0.0".to_owned(),
            })),
        }
    }

    fn chunk(bytes: &'static [u8]) -> ChartPart {
        ChartPart {
            kind: Some(chart_part::Kind::Chunk(bytes.into())),
        }
    }

    async fn linked(hub: &FakeHub, authority: &FakeAuthority) -> HubChart {
        let dialer = authority.dialer(hub.addresses(), Valid::Now);
        let connection = dialer.connect().await.unwrap();
        let (_, link) = watch::channel(Link::Up(connection));
        let (_, desired) = watch::channel(Some(Arc::new(desired())));
        HubChart::new(link, desired)
    }

    #[tokio::test]
    async fn the_chart_of_the_present_desired_state_comes_in_parts() {
        let authority = FakeAuthority::new();
        let hub = FakeHub::start(&authority).await;
        let from_hub = linked(&hub, &authority).await;
        hub.answers.chart.lock().unwrap().1 = vec![head(b"archive"), chunk(b"arch"), chunk(b"ive")];
        assert_eq!(from_hub.fetch(&chart()).await.unwrap(), b"archive");
        let asked = hub.answers.chart.lock().unwrap().0.clone().unwrap();
        assert_eq!(asked.digest, desired().digest());

        let other = ChartRef {
            version: "2.0.0".to_owned(),
            ..chart()
        };
        let said = from_hub.fetch(&other).await.unwrap_err();
        assert!(said.contains("not the chart"), "{said}");
    }

    #[tokio::test]
    async fn an_answer_that_is_damaged_or_too_long_is_not_used() {
        let authority = FakeAuthority::new();
        let hub = FakeHub::start(&authority).await;
        let from_hub = linked(&hub, &authority).await;
        let mut huge = head(b"archive");
        if let Some(chart_part::Kind::Head(head)) = &mut huge.kind {
            head.size = u64::MAX;
        }
        for (parts, word) in [
            (vec![], "no head"),
            (vec![chunk(b"archive")], "no head"),
            (vec![head(b"archive"), chunk(b"arch")], "damaged"),
            (vec![head(b"archive"), chunk(b"Archive")], "damaged"),
            (vec![head(b"archive"), chunk(b"archives")], "longer"),
            (vec![head(b"archive"), head(b"archive")], "two heads"),
            (vec![huge], "too large"),
        ] {
            hub.answers.chart.lock().unwrap().1 = parts;
            let said = from_hub.fetch(&chart()).await.unwrap_err();
            assert!(said.contains(word), "{word}: {said}");
        }
    }
}
