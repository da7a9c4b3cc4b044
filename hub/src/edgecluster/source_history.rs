//! Maintains the register of members: reads it before any EdgeCluster is created, keeps it current, and
//! resets it when the CRD of EdgeClusters was recreated.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::crd;
use krypton_runtime::newest::Newest as _;
use krypton_types::error_chain::chain;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::AFTER_FAILURE;
use crate::discovery::register::{self, Register, StoredRegister};
use crate::discovery::{NamedOrigin, Origin, RunningProvider, Sources};
use crate::edgecluster::api::{BoundSources, EdgeClusters};
use crate::leader::Leader;
use crate::leader::home_writer::MIN_WRITE_INTERVAL;

/// The stored register, and the wanted one. Every hub computes it. Only the leader writes it.
pub(super) struct SourceHistory {
    client: Client,
    /// The hub's namespace.
    namespace: String,
    sources: watch::Receiver<Sources>,
    /// The wanted register. `None` until the stored one is read.
    register: Option<Register>,
    stored: StoredRegister,
    /// Whether the two differ. Compared only after a change, and not in each iteration.
    differs: bool,
    /// Whether to read the register, possibly again: another hub may have written it.
    must_read: bool,
    /// Sources that have been absent since the last update of the register.
    departed: BTreeSet<Origin>,
    /// At most one request at a time.
    request: JoinSet<RequestResult>,
    not_before: BootTime,
}

/// The result of a request.
enum RequestResult {
    Read(StoredRegister),
    Written(StoredRegister),
    /// UID of the CRD of EdgeClusters. `None` if it is missing or being deleted.
    Crd(Option<String>),
    Failed,
}

impl SourceHistory {
    pub(super) fn new(
        client: Client,
        namespace: String,
        sources: watch::Receiver<Sources>,
    ) -> Self {
        Self {
            client,
            namespace,
            sources,
            register: None,
            stored: StoredRegister::default(),
            differs: false,
            must_read: true,
            departed: BTreeSet::new(),
            request: JoinSet::new(),
            not_before: BootTime::default(),
        }
    }

    /// Returns whether the members that any hub has recorded are known. A dismissed one does not become a member again.
    pub(super) fn is_read(&self) -> bool {
        self.register.is_some() && !self.must_read
    }

    /// Requests another read, because another hub may have written the register.
    pub(super) fn read_again(&mut self) {
        self.must_read = true;
    }

    /// Returns the sources that must not become members.
    pub(super) fn dismissed(&self, bound: &BoundSources) -> BTreeSet<NamedOrigin> {
        let register = self.register.as_ref();
        let dismissed = register.map(|register| register.dismissed(bound));
        dismissed.unwrap_or_default()
    }

    /// Updates the register after a change of sources or EdgeClusters.
    pub(super) fn update(&mut self, bound: &BoundSources) {
        let sources = self.sources.get();
        self.departed.extend(sources.take_departed());
        let Some(register) = &mut self.register else {
            return;
        };
        let providers: Vec<&RunningProvider> = sources.iter().collect();
        *register = register.next(&providers, &self.departed, bound);
        self.departed.clear();
        drop(sources);
        self.update_differs();
    }

    /// Records the source of an EdgeCluster that this hub has created. A user may delete it before the watch or a
    /// decision sees it.
    pub(super) fn record_created(&mut self, name: &str, source: &SourceRef) {
        if let Some(origin) = Origin::from_source_ref(source) {
            self.record(name, origin);
        }
    }

    /// Records the source of an EdgeCluster that a user has deleted. A source that is listed now has not requested the
    /// member again, even if it returned after the last decision. One that is away requests it by its return, even
    /// before the next decision.
    pub(super) fn record_deleted(&mut self, name: &str, source: &SourceRef) {
        let Some(origin) = Origin::from_source_ref(source) else {
            return;
        };
        let sources = self.sources.get();
        let mut listings = sources
            .iter()
            .filter_map(|running| running.listing.sources.as_deref());
        if listings.any(|listed| listed.contains_key(&origin)) {
            self.departed.extend(sources.take_departed());
            self.departed.remove(&origin);
            self.record(name, origin);
        } else if sources.is_away(&origin) {
            self.departed.insert(origin);
        }
    }

    fn record(&mut self, name: &str, origin: Origin) {
        if let Some(register) = &mut self.register {
            let entry = (name.to_owned(), origin);
            self.differs |= register.entries.insert(entry, String::new()).is_none();
        }
    }

    fn update_differs(&mut self) {
        let next = self.register.as_ref();
        self.differs = next.is_some_and(|next| *next != self.stored.register);
    }

    /// Starts the next request, if one is due. Returns when to call this again.
    pub(super) fn start_request(
        &mut self,
        edge_clusters: &mut EdgeClusters,
        leader: &Leader,
        now: BootTime,
    ) -> Option<BootTime> {
        let may_write = leader.may_write(now);
        if now < self.not_before {
            return Some(self.not_before);
        }
        if !self.request.is_empty() {
            return None;
        }
        let (client, namespace) = (self.client.clone(), self.namespace.clone());
        // Before the read, which fails without the CRD.
        if edge_clusters.any_deleted {
            self.request.spawn(leader.tracked(async move {
                let crd_uid = register::crd(client.clone()).await;
                // If no member needs the CRD, only this creates it again.
                if may_write
                    && matches!(crd_uid, Ok(None))
                    && let Err(error) = crd::ensure(&client, EdgeCluster::crd()).await
                {
                    tracing::warn!(error = %chain(&error), "failed to recreate the CRD of EdgeClusters; retrying");
                }
                result_or_failed(crd_uid.map(RequestResult::Crd).map_err(anyhow::Error::from))
            }));
            return None;
        }
        if self.must_read {
            self.request.spawn(async move {
                let read = register::load(client, &namespace).await;
                result_or_failed(read.map(RequestResult::Read))
            });
            return None;
        }
        let next = self.register.as_ref()?;
        // Until the EdgeClusters are listed, the register may be computed from stale ones.
        if !may_write || !edge_clusters.synced || !self.differs {
            return None;
        }
        let (previous, next) = (self.stored.clone(), next.clone());
        self.not_before = now + MIN_WRITE_INTERVAL;
        self.request.spawn(leader.tracked(async move {
            let written = register::save(client, &namespace, &previous, next).await;
            result_or_failed(written.map(RequestResult::Written))
        }));
        Some(self.not_before)
    }

    /// Waits until a request completes. Without one, waits forever.
    pub(super) async fn request_done(&mut self, edge_clusters: &mut EdgeClusters) {
        let Some(result) = self.request.join_next().await else {
            return std::future::pending().await;
        };
        let flow = self.apply(result.unwrap_or(RequestResult::Failed), edge_clusters);
        self.update_differs();
        if flow.is_break() {
            let pause = AFTER_FAILURE.mul_f64(0.5 + chance::random::<f64>());
            self.not_before = BootTime::now() + pause;
        }
    }

    /// Applies a result. Returns `Break` if the request must be retried after a pause.
    fn apply(
        &mut self,
        result: RequestResult,
        edge_clusters: &mut EdgeClusters,
    ) -> ControlFlow<()> {
        match result {
            RequestResult::Read(stored) => {
                let read = &stored.register;
                self.register = Some(match &self.register {
                    Some(computed) => computed.merge(read),
                    None => read.clone(),
                });
                self.stored = stored;
                self.must_read = false;
            }
            RequestResult::Written(stored) => self.stored = stored,
            RequestResult::Crd(None) => return ControlFlow::Break(()),
            RequestResult::Crd(Some(uid)) => {
                edge_clusters.any_deleted = false;
                if let Some(register) = self
                    .register
                    .as_mut()
                    .filter(|register| register.crd != uid)
                {
                    tracing::warn!("CRD of EdgeClusters was deleted; recreating all members");
                    *register = Register::new(uid);
                }
            }
            RequestResult::Failed => {
                self.must_read = true;
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }
}

fn result_or_failed(result: anyhow::Result<RequestResult>) -> RequestResult {
    result.unwrap_or_else(|error| {
        tracing::warn!(error = %chain(&*error), "writing the record of members failed; retrying");
        RequestResult::Failed
    })
}
