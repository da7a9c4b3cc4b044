//! Releases that wait to run Helm: first for the chart, then for a slot.
//!
//! A release that waits here has no plan. When its slot is free, the reconciler plans again and runs or drops it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use krypton_helm::chart::{ChartCache, ChartRef};
use krypton_helm::driver::Slot;
use krypton_helm::slots::priority::Priority;
use krypton_runtime::clock::BootTime;
use krypton_types::error_chain::chain;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tracing::{Instrument as _, Span};

use crate::actions::error::{ActionError, ActionResult};
use crate::inputs::Tools;
use crate::owner::OwnerKey;
use crate::plan::{Action, Attempt};

/// Inputs of a Helm run. A release whose request changes waits again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HelmRequest {
    pub(super) action: Action,
    /// `None` if the run needs no chart.
    pub(super) chart: Option<ChartRef>,
    pub(super) priority: Priority,
    pub(super) generation: i64,
}

/// The slot and the chart of a Helm run, which holds them until it ends.
pub(super) struct HelmReservation {
    pub(super) slot: Slot,
    /// Path of the chart on this machine.
    pub(super) chart: Option<PathBuf>,
    /// Covers the wait and the run.
    pub(super) span: Span,
}

/// A release that waits, and its task.
pub(super) struct WaitingRelease {
    pub(super) request: HelmRequest,
    pub(super) attempt: Attempt,
    pub(super) started: BootTime,
    pub(super) span: Span,
    task: AbortHandle,
}

/// A wait that ended without a slot.
pub(super) struct FailedWait {
    pub(super) key: OwnerKey,
    pub(super) waiting: WaitingRelease,
    /// `None` if the task itself has failed.
    pub(super) error: Option<ActionError>,
}

pub(super) type WaitResult = ActionResult<(Slot, Option<PathBuf>)>;

/// The waiting releases of one member, each once.
#[derive(Default)]
pub(super) struct HelmQueue {
    pub(super) tasks: JoinSet<WaitResult>,
    waiting: BTreeMap<OwnerKey, WaitingRelease>,
    reserved: BTreeMap<OwnerKey, (HelmRequest, HelmReservation)>,
}

impl HelmQueue {
    /// Returns the chart and slot if they are reserved for exactly this request. Ends a wait for any other request.
    pub(super) fn take(
        &mut self,
        key: &OwnerKey,
        request: Option<&HelmRequest>,
    ) -> Option<HelmReservation> {
        if let Some(waiting) = self.waiting.get(key)
            && Some(&waiting.request) != request
        {
            waiting.task.abort();
            self.waiting.remove(key);
        }
        let (reserved_for, reservation) = self.reserved.remove(key)?;
        (Some(&reserved_for) == request).then_some(reservation)
    }

    /// Waits for the chart and the slot, unless `key` waits already.
    pub(super) fn wait(
        &mut self,
        key: &OwnerKey,
        request: HelmRequest,
        attempt: Attempt,
        span: Span,
        (member, tools): (&str, &Tools),
    ) {
        if self.waiting.contains_key(key) {
            return;
        }
        let (member, tools) = (member.to_owned(), tools.clone());
        let (chart, priority) = (request.chart.clone(), request.priority);
        let reserving = async move {
            let chart = match &chart {
                Some(chart) => Some(Box::pin(fetch_chart(&tools.charts, chart)).await?),
                None => None,
            };
            Ok((tools.helm.slot(&member, priority).await, chart))
        };
        let task = self.tasks.spawn(reserving.instrument(span.clone()));
        let waiting = WaitingRelease {
            request,
            attempt,
            started: BootTime::now(),
            span,
            task,
        };
        self.waiting.insert(key.clone(), waiting);
    }

    /// Handles a wait that has ended. Returns the key of a release that is ready.
    pub(super) fn finish(
        &mut self,
        ended: Result<(Id, WaitResult), JoinError>,
    ) -> Option<Result<OwnerKey, FailedWait>> {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        // A wait that was cancelled may still have received its slot. Dropping `ended` returns that slot.
        let key = self
            .waiting
            .iter()
            .find(|(_, waiting)| waiting.task.id() == id);
        let key = key.map(|(key, _)| key.clone())?;
        let waiting = self.waiting.remove(&key)?;
        let error = match ended {
            Ok((_, Ok((slot, chart)))) => {
                let span = waiting.span;
                let reservation = HelmReservation { slot, chart, span };
                self.reserved
                    .insert(key.clone(), (waiting.request, reservation));
                return Some(Ok(key));
            }
            Ok((_, Err(error))) => Some(error),
            Err(_) => None,
        };
        Some(Err(FailedWait {
            key,
            waiting,
            error,
        }))
    }

    /// Frees the slots that no run took.
    pub(super) fn release_unused(&mut self) {
        self.reserved.clear();
    }

    /// Returns the number of waiting releases with this priority.
    pub(super) fn waiting_count(&self, priority: Priority) -> usize {
        let has_priority = |waiting: &&WaitingRelease| waiting.request.priority == priority;
        self.waiting.values().filter(has_priority).count()
    }
}

async fn fetch_chart(charts: &Arc<ChartCache>, chart: &ChartRef) -> ActionResult<PathBuf> {
    match charts.fetch(chart).await {
        Ok(fetched) => Ok(fetched.path),
        Err(error) => Err(ActionError::failed(error.reason(), chain(&*error))),
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::tenant::TenantKey;
    use tempfile::TempDir;

    use super::*;
    use crate::fixtures::tools;
    use crate::plan::Run;

    async fn empty_queue() -> (TempDir, Tools, HelmQueue) {
        let folder = TempDir::new().unwrap();
        let tools = tools(&folder).await;
        (folder, tools, HelmQueue::default())
    }

    fn key(name: &str) -> OwnerKey {
        OwnerKey::Tenant(TenantKey::new("default", name))
    }

    fn request(action: Action) -> HelmRequest {
        HelmRequest {
            priority: action.priority(false),
            action,
            chart: None,
            generation: 1,
        }
    }

    fn attempt() -> Attempt {
        Attempt {
            generation: 1,
            fingerprint: String::new(),
            requested: None,
            removal: None,
        }
    }

    fn wait(queue: &mut HelmQueue, tools: &Tools, name: &str, request: &HelmRequest) {
        let member = ("edge-1", tools);
        queue.wait(&key(name), request.clone(), attempt(), Span::none(), member);
    }

    async fn next(queue: &mut HelmQueue) -> Option<OwnerKey> {
        let ended = queue.tasks.join_next_with_id().await.unwrap();
        queue.finish(ended).and_then(Result::ok)
    }

    #[tokio::test]
    async fn slot_is_granted_only_for_queued_need() {
        let (_folder, tools, mut queue) = empty_queue().await;
        let upgrade = request(Action::Helm(Run::Upgrade));
        wait(&mut queue, &tools, "acme", &upgrade);
        assert_eq!(next(&mut queue).await, Some(key("acme")));

        // A deletion arrived in the meantime, so the slot goes to the next release.
        wait(&mut queue, &tools, "beta", &upgrade);
        let uninstall = request(Action::Uninstall);
        assert!(queue.take(&key("acme"), Some(&uninstall)).is_none());
        assert_eq!(next(&mut queue).await, Some(key("beta")));
        assert!(queue.take(&key("beta"), Some(&upgrade)).is_some());
    }

    #[tokio::test]
    async fn release_without_need_leaves_the_queue() {
        let (_folder, tools, mut queue) = empty_queue().await;
        let held = tools.helm.slot("edge-1", Priority::Low).await;
        let upgrade = request(Action::Helm(Run::Upgrade));
        for name in ["acme", "beta"] {
            wait(&mut queue, &tools, name, &upgrade);
            assert!(queue.take(&key(name), Some(&upgrade)).is_none());
        }
        assert_eq!(queue.waiting_count(Priority::Low), 2);

        assert!(queue.take(&key("acme"), None).is_none());
        assert_eq!(queue.waiting_count(Priority::Low), 1);
        drop(held);
        let mut ready = Vec::new();
        while let Some(ended) = queue.tasks.join_next_with_id().await {
            ready.extend(queue.finish(ended).and_then(Result::ok));
        }
        assert_eq!(ready, [key("beta")]);
    }

    #[tokio::test]
    async fn slots_that_no_run_took_are_free_again() {
        let (_folder, tools, mut queue) = empty_queue().await;
        wait(&mut queue, &tools, "acme", &request(Action::Uninstall));
        assert_eq!(next(&mut queue).await, Some(key("acme")));
        queue.release_unused();
        drop(tools.helm.slot("edge-1", Priority::Low).await);
        let uninstall = request(Action::Uninstall);
        assert!(queue.take(&key("acme"), Some(&uninstall)).is_none());
    }

    #[tokio::test]
    async fn failed_chart_fetch_holds_no_slot() {
        let (folder, tools, mut queue) = empty_queue().await;
        let held = tools.helm.slot("edge-1", Priority::Low).await;
        let chart = ChartRef {
            repo: String::new(),
            name: folder.path().join("missing.tgz").display().to_string(),
            version: "1.0.0".to_owned(),
        };
        let install = HelmRequest {
            chart: Some(chart),
            ..request(Action::Helm(Run::Install))
        };
        wait(&mut queue, &tools, "acme", &install);
        let ended = queue.tasks.join_next_with_id().await.unwrap();
        let Some(Err(failed)) = queue.finish(ended) else {
            panic!("there is no such chart");
        };
        assert_eq!((failed.key, failed.waiting.request), (key("acme"), install));
        assert!(failed.error.is_some());
        assert_eq!(queue.waiting_count(Priority::High), 0);
        drop(held);
    }
}
