//! Ends the watches of an untrusted API server that shows more than Krypton keeps.

use std::time::Duration;

use futures::stream::SelectAll;
use krypton_runtime::access::{CutOff, Report};
use krypton_runtime::clock::BootTime;
use kube::Client;

use super::watches::{self, Watch};
use crate::index::Index;

/// The pause before the watches restart. The hub shows the excess for longer.
const PAUSE: Duration = Duration::from_secs(4 * 60);

/// The bounds on the memory of one member's objects.
pub(super) struct Bounds {
    /// Receives each excess; `None` if the server is trusted, which has no bounds.
    report: Option<Report>,
    /// The time when the watches restart.
    until: Option<BootTime>,
}

impl Bounds {
    pub(crate) fn new(report: Option<Report>) -> Self {
        Self {
            report,
            until: None,
        }
    }

    /// Whether the watches have ended. Later events of them are ignored.
    pub(super) fn ended(&self) -> bool {
        self.until.is_some()
    }

    /// When the watches restart.
    pub(crate) fn wake(&self) -> Option<BootTime> {
        self.until
    }

    /// Drops what the index keeps if that is too much, and returns the reason. `waiting` keys count as well.
    pub(super) fn check(
        &mut self,
        index: &mut Index,
        waiting: usize,
        now: BootTime,
    ) -> Option<String> {
        let report = self.report.as_ref()?;
        let cut_off = CutOff::kept(index.beyond(waiting)?);
        report(&cut_off);
        index.forget_watched();
        self.until = Some(BootTime(now.0 + PAUSE));
        Some(cut_off.to_string())
    }

    /// Ends the watches after an excess, and restarts them after the pause.
    pub(super) fn apply(
        &mut self,
        client: &Client,
        watches: &mut SelectAll<Watch>,
        tenants: &mut Option<Watch>,
        now: BootTime,
    ) {
        let Some(until) = self.until else { return };
        if now < until {
            watches.clear();
            *tenants = None;
        } else {
            self.until = None;
            *watches = watches::all_but_tenants(client);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use futures::StreamExt as _;
    use futures::stream::{self, select_all};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use kube::client::Body;
    use kube::runtime::watcher::Event;

    use super::*;

    fn namespaces(index: &mut Index, bytes: usize) {
        for number in 0..64 {
            let meta = ObjectMeta {
                name: Some(format!("{number:03}{}", "n".repeat(bytes / 64))),
                ..ObjectMeta::default()
            };
            index.workspace_event(Event::InitApply(meta));
        }
    }

    fn reached(
        _: http::Request<Body>,
    ) -> impl Future<Output = Result<http::Response<Body>, Infallible>> {
        std::future::pending()
    }

    #[tokio::test]
    async fn untrusted_server_beyond_the_bounds_is_paused() {
        let client = Client::new(tower::service_fn(reached), "default");
        let reports = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&reports);
        let report: Report =
            Arc::new(move |cut: &CutOff| log.lock().unwrap().push(cut.to_string()));
        let mut bounds = Bounds::new(Some(report));
        let (mut index, begun) = (Index::new("one", None), BootTime::now());
        index.workspace_event::<ObjectMeta>(Event::Init);
        let mut watches = select_all([stream::pending().boxed()]);
        namespaces(&mut index, 1 << 20);
        assert_eq!(bounds.check(&mut index, 0, begun), None);
        bounds.apply(&client, &mut watches, &mut None, begun);
        assert_eq!((watches.len(), bounds.ended()), (1, false));

        namespaces(&mut index, 65 << 20);
        let problem = bounds.check(&mut index, 0, begun).unwrap();
        assert!(problem.contains("more than 67108864 bytes"), "{problem}");
        assert_eq!(*reports.lock().unwrap(), [problem]);
        assert_eq!(index.beyond(0), None);
        bounds.apply(&client, &mut watches, &mut None, begun);
        assert_eq!((watches.len(), bounds.ended()), (0, true));
        let later = BootTime(begun.0 + PAUSE);
        assert_eq!(bounds.wake(), Some(later));
        bounds.apply(&client, &mut watches, &mut None, later);
        assert_eq!((watches.len(), bounds.ended()), (6, false));
    }

    #[test]
    fn trusted_server_has_no_bounds() {
        let mut index = Index::new("one", None);
        index.workspace_event::<ObjectMeta>(Event::Init);
        namespaces(&mut index, 65 << 20);
        let mut bounds = Bounds::new(None);
        assert_eq!(bounds.check(&mut index, 0, BootTime::now()), None);
        assert!(index.beyond(0).is_some());
    }
}
