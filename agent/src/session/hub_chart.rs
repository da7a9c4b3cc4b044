//! Fetches a chart from the hub, for clusters that cannot reach the chart repository.

use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::BoxFuture;
use krypton_helm::chart::{CHART_LIMIT, ChartRef, Fallback};
use krypton_proto::v1::{ChartHead, FetchChartRequest, chart_part};
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::DesiredState;
use krypton_types::fingerprint::sha256_hex;
use tokio::sync::watch;
use tonic::Status;

use crate::session::Link;
use crate::session::connect::Connection;

/// Fetches over the session's connection. The hub serves only the chart of the current desired state.
#[derive(Debug)]
pub struct HubChart {
    link: watch::Receiver<Link>,
    desired: watch::Receiver<Option<Arc<DesiredState>>>,
    /// Bytes of an interrupted download. The next download resumes after them, which helps on unreliable links.
    kept: Mutex<Part>,
}

/// First bytes of a chart, at most [`CHART_LIMIT`].
#[derive(Debug, Default)]
struct Part {
    sha256: String,
    bytes: Vec<u8>,
}

/// A download in progress. Dropping it stores the bytes, also if the caller has cancelled the download.
struct Growing<'a> {
    part: Part,
    kept: &'a Mutex<Part>,
}

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        let part = std::mem::take(&mut self.part);
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = part;
    }
}

impl HubChart {
    pub fn new(
        link: watch::Receiver<Link>,
        desired: watch::Receiver<Option<Arc<DesiredState>>>,
    ) -> Self {
        Self {
            link,
            desired,
            kept: Mutex::default(),
        }
    }

    async fn get(&self, chart: ChartRef) -> Result<Vec<u8>, String> {
        let digest = {
            let desired = self.desired.get();
            let present = desired.as_deref().filter(|desired| is_of(desired, &chart));
            present.map(DesiredState::digest)
        };
        let Some(digest) = digest else {
            return Err("the hub does not serve this chart".to_owned());
        };
        let connection = self.link.get().connection().cloned();
        let Some(connection) = connection else {
            return Err("there is no session with the hub".to_owned());
        };
        let mut growing = Growing {
            part: std::mem::take(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner)),
            kept: &self.kept,
        };
        let got = download(&connection, digest, &mut growing.part).await;
        got.map_err(|problem| match problem {
            Problem::Call(status) => {
                let message: String = status.message().chars().take(500).collect();
                let address = connection.address();
                format!("the hub at {address} does not serve it: {message}")
            }
            Problem::Content(problem) => {
                // Discard corrupt content instead of resuming it.
                growing.part = Part::default();
                problem.to_owned()
            }
        })
    }
}

impl Fallback for HubChart {
    fn fetch(&self, chart: &ChartRef) -> BoxFuture<'_, Result<Vec<u8>, String>> {
        self.get(chart.clone()).boxed()
    }
}

/// Returns whether `desired` refers to `chart`. An empty version means the newest, which the caller may have resolved.
fn is_of(desired: &DesiredState, chart: &ChartRef) -> bool {
    let present = &desired.chart;
    (&present.repo, &present.name) == (&chart.repo, &chart.name)
        && (present.version_to_fetch() == chart.version || present.version_to_fetch().is_empty())
}

enum Problem {
    Call(Box<Status>),
    Content(&'static str),
}

/// The chart cache sets the deadline.
async fn download(
    connection: &Connection,
    digest: String,
    part: &mut Part,
) -> Result<Vec<u8>, Problem> {
    let call = |status: Status| Problem::Call(Box::new(status));
    let request = FetchChartRequest {
        digest,
        from: part.bytes.len() as u64,
        from_sha256: part.sha256.clone(),
        ..FetchChartRequest::default()
    };
    let mut fleet = connection.fleet();
    let answer = fleet.fetch_chart(request).await;
    let mut parts = answer.map_err(call)?.into_inner();
    let mut next = async || {
        let part = parts.message().await.map_err(call)?;
        Ok(part.and_then(|part| part.kind))
    };
    let Some(chart_part::Kind::Head(head)) = next().await? else {
        return Err(Problem::Content("the hub's answer has no head"));
    };
    let size = continued(&head, part).map_err(Problem::Content)?;
    while let Some(chunk) = next().await? {
        let chart_part::Kind::Chunk(chunk) = chunk else {
            return Err(Problem::Content("the hub's answer has two heads"));
        };
        if part.bytes.len() + chunk.len() > size {
            return Err(Problem::Content(
                "the hub's response is longer than announced",
            ));
        }
        part.bytes.extend_from_slice(&chunk);
    }
    let whole = std::mem::take(part);
    if whole.bytes.len() != size || sha256_hex(&whole.bytes) != head.sha256 {
        return Err(Problem::Content("the hub's answer came damaged"));
    }
    Ok(whole.bytes)
}

/// Returns the size of the complete chart. Clears the stored bytes unless the hub resumes after them.
fn continued(head: &ChartHead, part: &mut Part) -> Result<usize, &'static str> {
    if head.size > CHART_LIMIT {
        return Err("the hub's chart is too large");
    }
    let goes_on = head.sha256 == part.sha256 && head.from == part.bytes.len() as u64;
    if head.from != 0 && !goes_on {
        return Err("the hub's response starts at the wrong offset");
    }
    let size = usize::try_from(head.size).unwrap_or(usize::MAX);
    if head.from == 0 {
        *part = Part {
            sha256: head.sha256.clone(),
            bytes: Vec::with_capacity(size),
        };
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use krypton_proto::v1::ChartPart;
    use krypton_types::desired::ChartState;

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
            chart: ChartState {
                repo,
                name,
                version,
                ..ChartState::default()
            },
            ..DesiredState::default()
        }
    }

    fn head(bytes: &[u8]) -> ChartPart {
        ChartPart {
            kind: Some(chart_part::Kind::Head(ChartHead {
                sha256: sha256_hex(bytes),
                size: bytes.len() as u64,
                version: "1.0.0".to_owned(),
                from: 0,
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
    async fn chart_of_present_desired_state_arrives_in_parts() {
        let authority = FakeAuthority::new();
        let hub = FakeHub::start(&authority).await;
        let from_hub = linked(&hub, &authority).await;
        hub.answers.chart.lock().unwrap().1 =
            vec![Ok(head(b"archive")), Ok(chunk(b"arch")), Ok(chunk(b"ive"))];
        assert_eq!(from_hub.fetch(&chart()).await.unwrap(), b"archive");
        let asked = hub.answers.chart.lock().unwrap().0.clone().unwrap();
        assert_eq!(asked.digest, desired().digest());

        let other = ChartRef {
            version: "2.0.0".to_owned(),
            ..chart()
        };
        let said = from_hub.fetch(&other).await.unwrap_err();
        assert!(said.contains("does not serve this chart"), "{said}");
    }

    #[tokio::test]
    async fn damaged_or_oversized_chart_answer_is_rejected() {
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
            hub.answers.chart.lock().unwrap().1 = parts.into_iter().map(Ok).collect();
            let said = from_hub.fetch(&chart()).await.unwrap_err();
            assert!(said.contains(word), "{word}: {said}");
        }
    }

    fn after(from: u64, mut part: ChartPart) -> ChartPart {
        if let Some(chart_part::Kind::Head(head)) = &mut part.kind {
            head.from = from;
        }
        part
    }

    #[tokio::test]
    async fn interrupted_fetch_resumes_and_other_chart_restarts() {
        let authority = FakeAuthority::new();
        let hub = FakeHub::start(&authority).await;
        let from_hub = linked(&hub, &authority).await;
        let gone = || Err(Status::unavailable("the link is gone"));
        let answers = |parts: Vec<Result<ChartPart, Status>>| {
            hub.answers.chart.lock().unwrap().1 = parts;
        };
        let asked = || {
            let asked = hub.answers.chart.lock().unwrap().0.clone().unwrap();
            (asked.from, asked.from_sha256)
        };
        answers(vec![Ok(head(b"archive")), Ok(chunk(b"arch")), gone()]);
        let said = from_hub.fetch(&chart()).await.unwrap_err();
        assert!(said.contains("the link is gone"), "{said}");
        // An interruption without new data keeps the stored bytes.
        answers(vec![gone()]);
        from_hub.fetch(&chart()).await.unwrap_err();
        assert_eq!(asked(), (4, sha256_hex(b"archive")));
        answers(vec![Ok(after(4, head(b"archive"))), Ok(chunk(b"ive"))]);
        assert_eq!(from_hub.fetch(&chart()).await.unwrap(), b"archive");

        answers(vec![Ok(head(b"archive")), Ok(chunk(b"arch")), gone()]);
        from_hub.fetch(&chart()).await.unwrap_err();
        answers(vec![Ok(head(b"another")), Ok(chunk(b"another"))]);
        assert_eq!(from_hub.fetch(&chart()).await.unwrap(), b"another");

        // The response resumes although the agent did not request it, so the agent discards it.
        answers(vec![Ok(after(4, head(b"archive"))), Ok(chunk(b"ive"))]);
        let said = from_hub.fetch(&chart()).await.unwrap_err();
        assert!(said.contains("wrong offset"), "{said}");
        assert_eq!(asked(), (0, String::new()));
    }
}
