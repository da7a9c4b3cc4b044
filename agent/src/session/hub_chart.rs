//! Fetches a chart from the hub, for clusters that cannot reach the chart repository.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use krypton_helm::chart::{CHART_LIMIT, ChartRef, Fallback};
use krypton_proto::v1::{ChartHead, FetchChartRequest, chart_part};
use krypton_runtime::newest::Newest as _;
use krypton_types::desired::DesiredState;
use krypton_types::fingerprint::sha256_hex;
use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::Status;

use crate::session::Link;
use crate::session::connect::{Connection, status_message};

/// Fetches over the session's connection. The hub serves only the chart of the current desired state.
#[derive(Debug)]
pub struct HubChart {
    link: watch::Receiver<Link>,
    desired: watch::Receiver<Option<Arc<DesiredState>>>,
    /// Bytes of an interrupted download. The next download resumes after them, which helps on unreliable links.
    interrupted: Mutex<PartialChart>,
}

/// First bytes of a chart, at most [`CHART_LIMIT`].
#[derive(Debug, Default)]
struct PartialChart {
    sha256: String,
    bytes: Vec<u8>,
}

/// A download in progress. Dropping it stores the bytes, also if the caller has cancelled the download.
struct Download<'a> {
    partial: PartialChart,
    interrupted: &'a Mutex<PartialChart>,
}

impl Drop for Download<'_> {
    fn drop(&mut self) {
        let partial = std::mem::take(&mut self.partial);
        *self.interrupted.lock() = partial;
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
            interrupted: Mutex::default(),
        }
    }

    async fn get(&self, chart: ChartRef) -> Result<Vec<u8>, String> {
        let desired = self.desired.get();
        let desired = desired.filter(|desired| refers_to(desired, &chart));
        let digest = desired.ok_or("the hub does not serve this chart")?.digest();
        let connection = self.link.get().connection().cloned();
        let connection = connection.ok_or("there is no session with the hub")?;
        let mut download_guard = Download {
            partial: std::mem::take(&mut self.interrupted.lock()),
            interrupted: &self.interrupted,
        };
        let result = download(&connection, digest, &mut download_guard.partial).await;
        result.map_err(|problem| match problem {
            DownloadError::Call(status) => {
                let message = status_message(&status);
                let address = connection.address();
                format!("the hub at {address} does not serve it: {message}")
            }
            DownloadError::Content(problem) => {
                // Discard corrupt content instead of resuming it.
                download_guard.partial = PartialChart::default();
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
fn refers_to(desired: &DesiredState, chart: &ChartRef) -> bool {
    let current = &desired.chart;
    (&current.repo, &current.name) == (&chart.repo, &chart.name)
        && (current.version_to_fetch() == chart.version || current.version_to_fetch().is_empty())
}

enum DownloadError {
    Call(Box<Status>),
    Content(&'static str),
}

/// The chart cache sets the deadline.
async fn download(
    connection: &Connection,
    digest: String,
    partial: &mut PartialChart,
) -> Result<Vec<u8>, DownloadError> {
    let call_error = |status: Status| DownloadError::Call(Box::new(status));
    let request = FetchChartRequest {
        digest,
        from: partial.bytes.len() as u64,
        from_sha256: partial.sha256.clone(),
        ..FetchChartRequest::default()
    };
    let mut fleet = connection.fleet();
    let response = fleet.fetch_chart(request).await;
    let mut parts = response.map_err(call_error)?.into_inner();
    let mut next = async || {
        let part = parts.message().await.map_err(call_error)?;
        Ok(part.and_then(|part| part.kind))
    };
    let Some(chart_part::Kind::Head(head)) = next().await? else {
        return Err(DownloadError::Content("the hub's answer has no head"));
    };
    let size = resume_or_restart(&head, partial).map_err(DownloadError::Content)?;
    while let Some(chunk) = next().await? {
        let chart_part::Kind::Chunk(chunk) = chunk else {
            return Err(DownloadError::Content("the hub's response has two heads"));
        };
        if partial.bytes.len() + chunk.len() > size {
            return Err(DownloadError::Content(
                "the hub's response is longer than announced",
            ));
        }
        partial.bytes.extend_from_slice(&chunk);
    }
    let complete = std::mem::take(partial);
    if complete.bytes.len() != size || sha256_hex(&complete.bytes) != head.sha256 {
        return Err(DownloadError::Content("the hub's response is damaged"));
    }
    Ok(complete.bytes)
}

/// Returns the size of the complete chart. Clears the stored bytes unless the hub resumes after them.
fn resume_or_restart(head: &ChartHead, partial: &mut PartialChart) -> Result<usize, &'static str> {
    if head.size > CHART_LIMIT {
        return Err("the hub's chart is too large");
    }
    let continues = head.sha256 == partial.sha256 && head.from == partial.bytes.len() as u64;
    if head.from != 0 && !continues {
        return Err("the hub's response starts at the wrong offset");
    }
    let size = usize::try_from(head.size).unwrap_or(usize::MAX);
    if head.from == 0 {
        *partial = PartialChart {
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
    use crate::fake_hub::{FakeAuthority, FakeHub, Validity};

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
        changed_head(bytes, |_| {})
    }

    fn changed_head(bytes: &[u8], change: impl FnOnce(&mut ChartHead)) -> ChartPart {
        let mut head = ChartHead {
            sha256: sha256_hex(bytes),
            size: bytes.len() as u64,
            version: "1.0.0".to_owned(),
            from: 0,
        };
        change(&mut head);
        ChartPart {
            kind: Some(chart_part::Kind::Head(head)),
        }
    }

    fn chunk(bytes: &'static [u8]) -> ChartPart {
        ChartPart {
            kind: Some(chart_part::Kind::Chunk(bytes.into())),
        }
    }

    async fn hub_and_chart() -> (FakeHub, HubChart) {
        let authority = FakeAuthority::new();
        let hub = FakeHub::start(&authority).await;
        let dialer = authority.dialer(hub.addresses(), Validity::Now);
        let connection = dialer.connect().await.unwrap();
        let (_, link) = watch::channel(Link::Up(connection));
        let (_, desired) = watch::channel(Some(Arc::new(desired())));
        (hub, HubChart::new(link, desired))
    }

    #[tokio::test]
    async fn chart_of_present_desired_state_arrives_in_parts() {
        let (hub, source) = hub_and_chart().await;
        hub.responses.chart.lock().1 =
            vec![Ok(head(b"archive")), Ok(chunk(b"arch")), Ok(chunk(b"ive"))];
        assert_eq!(source.fetch(&chart()).await.unwrap(), b"archive");
        let requested = hub.responses.chart.lock().0.clone().unwrap();
        assert_eq!(requested.digest, desired().digest());

        let other = ChartRef {
            version: "2.0.0".to_owned(),
            ..chart()
        };
        let message = source.fetch(&other).await.unwrap_err();
        assert!(message.contains("does not serve this chart"), "{message}");
    }

    #[tokio::test]
    async fn damaged_or_oversized_chart_answer_is_rejected() {
        let (hub, source) = hub_and_chart().await;
        let huge = changed_head(b"archive", |head| head.size = u64::MAX);
        for (parts, word) in [
            (vec![], "no head"),
            (vec![chunk(b"archive")], "no head"),
            (vec![head(b"archive"), chunk(b"arch")], "damaged"),
            (vec![head(b"archive"), chunk(b"Archive")], "damaged"),
            (vec![head(b"archive"), chunk(b"archives")], "longer"),
            (vec![head(b"archive"), head(b"archive")], "two heads"),
            (vec![huge], "too large"),
        ] {
            hub.responses.chart.lock().1 = parts.into_iter().map(Ok).collect();
            let message = source.fetch(&chart()).await.unwrap_err();
            assert!(message.contains(word), "{word}: {message}");
        }
    }

    #[tokio::test]
    async fn interrupted_fetch_resumes_and_other_chart_restarts() {
        let (hub, source) = hub_and_chart().await;
        let disconnected = || Err(Status::unavailable("the link is gone"));
        let respond = |parts: Vec<Result<ChartPart, Status>>| {
            hub.responses.chart.lock().1 = parts;
        };
        let interrupted = || {
            let (head, chunk) = (head(b"archive"), chunk(b"arch"));
            vec![Ok(head), Ok(chunk), disconnected()]
        };
        let rest = || {
            let head = changed_head(b"archive", |head| head.from = 4);
            vec![Ok(head), Ok(chunk(b"ive"))]
        };
        let requested = || {
            let requested = hub.responses.chart.lock().0.clone().unwrap();
            (requested.from, requested.from_sha256)
        };
        respond(interrupted());
        let message = source.fetch(&chart()).await.unwrap_err();
        assert!(message.contains("the link is gone"), "{message}");
        // An interruption without new data keeps the stored bytes.
        respond(vec![disconnected()]);
        source.fetch(&chart()).await.unwrap_err();
        assert_eq!(requested(), (4, sha256_hex(b"archive")));
        respond(rest());
        assert_eq!(source.fetch(&chart()).await.unwrap(), b"archive");

        respond(interrupted());
        source.fetch(&chart()).await.unwrap_err();
        respond(vec![Ok(head(b"another")), Ok(chunk(b"another"))]);
        assert_eq!(source.fetch(&chart()).await.unwrap(), b"another");

        // The response resumes although the agent did not request it, so the agent discards it.
        respond(rest());
        let message = source.fetch(&chart()).await.unwrap_err();
        assert!(message.contains("wrong offset"), "{message}");
        assert_eq!(requested(), (0, String::new()));
    }
}
