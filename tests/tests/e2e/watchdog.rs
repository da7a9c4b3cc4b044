//! Shows that the watchdog restarts a hub whose work hangs or has ended because of a bug.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use krypton_runtime::failpoint::{PLAN, STRUCK};
use krypton_tests::{Cluster, Hub, HubOptions, Parts, TestResult, fleet::PATIENCE};
use rustix::process::Signal;

/// Exceeds the watchdog's timeout of one minute.
const MINUTES: Duration = Duration::from_secs(180);

/// Runs a hub with this fault plan until it ends, then verifies that a hub without the plan becomes ready. Returns the
/// first hub's exit status and log.
async fn ends(name: &str, plan: &str) -> TestResult<(std::process::ExitStatus, String)> {
    let home = Cluster::start(name, Parts::ControlPlane).await?;
    let struck = tempfile::NamedTempFile::new()?;
    let options = HubOptions::new(home.kubeconfig())
        .args(["--chart-name=small", "--chart-version=1.0.0"])
        .args(["--chart-repo=http://127.0.0.1:1", "--retry-max=5s"]);
    let mut hub = Hub::start(
        &options
            .clone()
            .env(PLAN, plan)
            .env(STRUCK, struck.path().to_str().unwrap()),
    )?;
    let status = hub.wait(MINUTES).await?;
    let log = hub.log()?;
    let mut next = Hub::start(&options.in_place_of(&hub))?;
    next.ready(PATIENCE).await?;
    Ok((status, log))
}

#[tokio::test]
async fn stalled_hub_aborts_and_next_hub_becomes_ready() {
    let (status, log) = ends("hangs", "lease.create:after=hang").await.unwrap();
    assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "{log}");
    assert!(
        log.contains("no progress for 60 s") && log.contains("watchdog"),
        "{log}"
    );
}

#[tokio::test]
async fn hub_exits_and_names_ended_task() {
    let (status, log) = ends("panics", "lease.create:after=panic").await.unwrap();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("leader election ended badly"), "{log}");
}
