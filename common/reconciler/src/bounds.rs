//! Ends the watches of an untrusted API server whose objects exceed Krypton's memory limits.

use std::time::Duration;

use futures::stream::SelectAll;
use krypton_runtime::access::{CutOffCallback, CutOffError};
use krypton_runtime::clock::BootTime;
use kube::Client;

use super::watches::{self, Watch};
use crate::index::Index;

/// The pause before the watches restart. The hub shows the excess for longer.
const RESTART_PAUSE: Duration = Duration::from_secs(4 * 60);

/// The bounds on the memory of one member's objects.
pub(super) struct WatchBounds {
    /// Receives each excess; `None` if the server is trusted, which has no bounds.
    on_excess: Option<CutOffCallback>,
    /// The time when the watches restart.
    restart_at: Option<BootTime>,
}

impl WatchBounds {
    pub(crate) fn new(on_excess: Option<CutOffCallback>) -> Self {
        Self {
            on_excess,
            restart_at: None,
        }
    }

    /// Whether the watches have ended. Later events of them are ignored.
    pub(super) fn has_ended_watches(&self) -> bool {
        self.restart_at.is_some()
    }

    /// When the watches restart.
    pub(crate) fn wake(&self) -> Option<BootTime> {
        self.restart_at
    }

    /// Drops what the index keeps if that is too much, and returns the reason. `waiting` keys count as well.
    pub(super) fn check(
        &mut self,
        index: &mut Index,
        waiting: usize,
        now: BootTime,
    ) -> Option<String> {
        let on_excess = self.on_excess.as_ref()?;
        let cut_off = CutOffError::stored(index.exceeded_bound(waiting)?);
        on_excess(&cut_off);
        index.clear_watched();
        self.restart_at = Some(now + RESTART_PAUSE);
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
        let Some(restart_at) = self.restart_at else {
            return;
        };
        if now < restart_at {
            watches.clear();
            *tenants = None;
        } else {
            self.restart_at = None;
            *watches = watches::all_except_tenants(client);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;

    use futures::StreamExt as _;
    use futures::stream::{self, select_all};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use kube::client::Body;
    use kube::core::PartialObjectMetaExt as _;
    use kube::runtime::watcher::Event;
    use parking_lot::Mutex;

    use super::*;

    fn add_namespaces(index: &mut Index, bytes: usize) {
        for number in 0..64 {
            let meta = ObjectMeta {
                name: Some(format!("{number:03}{}", "n".repeat(bytes / 64))),
                ..ObjectMeta::default()
            };
            index.workspace_event(Event::InitApply(meta.into_response_partial()));
        }
    }

    fn never_responds(
        _: http::Request<Body>,
    ) -> impl Future<Output = Result<http::Response<Body>, Infallible>> {
        std::future::pending()
    }

    #[tokio::test]
    async fn untrusted_server_beyond_the_bounds_is_paused() {
        let client = Client::new(tower::service_fn(never_responds), "default");
        let reports = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&reports);
        let on_excess: CutOffCallback =
            Arc::new(move |cut_off: &CutOffError| log.lock().push(cut_off.to_string()));
        let mut bounds = WatchBounds::new(Some(on_excess));
        let (mut index, now) = (Index::new("one", None), BootTime::now());
        index.workspace_event(Event::Init);
        let mut watches = select_all([stream::pending().boxed()]);
        add_namespaces(&mut index, 1 << 20);
        assert_eq!(bounds.check(&mut index, 0, now), None);
        bounds.apply(&client, &mut watches, &mut None, now);
        assert_eq!((watches.len(), bounds.has_ended_watches()), (1, false));

        add_namespaces(&mut index, 65 << 20);
        let problem = bounds.check(&mut index, 0, now).unwrap();
        assert!(problem.contains("more than 67108864 bytes"), "{problem}");
        assert_eq!(*reports.lock(), [problem]);
        assert_eq!(index.exceeded_bound(0), None);
        bounds.apply(&client, &mut watches, &mut None, now);
        assert_eq!((watches.len(), bounds.has_ended_watches()), (0, true));
        let later = now + RESTART_PAUSE;
        assert_eq!(bounds.wake(), Some(later));
        bounds.apply(&client, &mut watches, &mut None, later);
        assert_eq!((watches.len(), bounds.has_ended_watches()), (6, false));
    }

    #[test]
    fn trusted_server_has_no_bounds() {
        let mut index = Index::new("one", None);
        index.workspace_event(Event::Init);
        add_namespaces(&mut index, 65 << 20);
        let mut bounds = WatchBounds::new(None);
        assert_eq!(bounds.check(&mut index, 0, BootTime::now()), None);
        assert!(index.exceeded_bound(0).is_some());
    }
}
