//! Maintains the register of members: reads it before any EdgeCluster is created, keeps it current, and
//! resets it when the CRD of EdgeClusters was recreated.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::chance;
use krypton_runtime::clock::BootTime;
use krypton_runtime::crd;
use krypton_runtime::newest::Newest as _;
use krypton_types::error_chain::chain;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::AFTER_FAILURE;
use crate::discovery::register::{self, Entry, OnRecord, Register, RegisterError};
use crate::discovery::{Found, Origin, Sources};
use crate::edgecluster::api::{Bound, EdgeClusters};
use crate::leader::Leader;
use crate::leader::home_writer::PACE;

/// The recorded register, and its target. Every hub computes it. Only the leader writes it.
pub(super) struct SourceHistory {
    client: Client,
    /// The hub's namespace.
    namespace: String,
    sources: watch::Receiver<Sources>,
    /// The target. `None` until the register is read.
    register: Option<Register>,
    on_record: OnRecord,
    /// Whether the two differ. Compared only after a change, and not in each iteration.
    differs: bool,
    /// Whether to read the register, possibly again: another hub may have written it.
    unread: bool,
    /// Sources that have been absent since the last update of the register.
    departed: BTreeSet<Origin>,
    /// At most one request at a time.
    call: JoinSet<Said>,
    not_before: BootTime,
}

/// The result of a request.
enum Said {
    Read(OnRecord),
    Written(OnRecord),
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
            on_record: OnRecord::default(),
            differs: false,
            unread: true,
            departed: BTreeSet::new(),
            call: JoinSet::new(),
            not_before: BootTime::default(),
        }
    }

    /// Returns whether earlier members are known. A dismissed one does not become a member again.
    pub(super) fn is_read(&self) -> bool {
        self.register.is_some()
    }

    /// Requests another read, because another hub may have written the register.
    pub(super) fn read_again(&mut self) {
        self.unread = true;
    }

    /// Returns the sources that must not become members.
    pub(super) fn dismissed(&self, bound: &Bound) -> BTreeSet<Entry> {
        let register = self.register.as_ref();
        let dismissed = register.map(|register| register.dismissed(bound));
        dismissed.unwrap_or_default()
    }

    /// Updates the register after a change of sources or EdgeClusters.
    pub(super) fn follow(&mut self, bound: &Bound) {
        let sources = self.sources.get();
        self.departed.extend(sources.take_departed());
        let Some(register) = &mut self.register else {
            return;
        };
        let found: Vec<&Found> = sources.iter().collect();
        *register = register.next(&found, &self.departed, bound);
        self.departed.clear();
        drop(sources);
        self.compare();
    }

    fn compare(&mut self) {
        let next = self.register.as_ref();
        self.differs = next.is_some_and(|next| *next != self.on_record.register);
    }

    /// Starts the next request, if one is due. Returns when to call this again.
    pub(super) fn work(
        &mut self,
        edge_clusters: &mut EdgeClusters,
        lead: &Leader,
        now: BootTime,
    ) -> Option<BootTime> {
        let leading = lead.writes(now);
        if now < self.not_before {
            return Some(self.not_before);
        }
        if !self.call.is_empty() {
            return None;
        }
        let (client, namespace) = (self.client.clone(), self.namespace.clone());
        if self.unread {
            self.call.spawn(async move {
                said(register::load(client, &namespace).await.map(Said::Read))
            });
            return None;
        }
        if edge_clusters.vanished {
            self.call.spawn(lead.tracked(async move {
                let found = register::crd(client.clone()).await;
                // If no member needs the CRD, only this creates it again.
                if leading
                    && matches!(found, Ok(None))
                    && let Err(error) = crd::ensure(&client, &EdgeCluster::crd()).await
                {
                    tracing::warn!(error = %chain(&error), "the CRD of EdgeClusters is missing and not created again yet");
                }
                said(found.map(Said::Crd).map_err(RegisterError::from))
            }));
            return None;
        }
        let next = self.register.as_ref()?;
        // Until the EdgeClusters are listed, the register may be computed from stale ones.
        if !leading || !edge_clusters.synced || !self.differs {
            return None;
        }
        let (before, next) = (self.on_record.clone(), next.clone());
        self.not_before = BootTime(now.0 + PACE);
        self.call.spawn(lead.tracked(async move {
            said(
                register::save(client, &namespace, &before, next)
                    .await
                    .map(Said::Written),
            )
        }));
        Some(self.not_before)
    }

    /// Waits until a request completes. Without one, waits forever.
    pub(super) async fn answered(&mut self, edge_clusters: &mut EdgeClusters) {
        let Some(said) = self.call.join_next().await else {
            return std::future::pending().await;
        };
        let took = self.take(said.unwrap_or(Said::Failed), edge_clusters);
        self.compare();
        if took.is_break() {
            let pause = AFTER_FAILURE.mul_f64(0.5 + chance::random::<f64>());
            self.not_before = BootTime(BootTime::now().0 + pause);
        }
    }

    /// Applies a result. Returns `Break` if the request must be retried after a pause.
    fn take(&mut self, said: Said, edge_clusters: &mut EdgeClusters) -> ControlFlow<()> {
        match said {
            Said::Read(on_record) => {
                let read = &on_record.register;
                self.register = Some(match &self.register {
                    Some(seen) => seen.with(read),
                    None => read.clone(),
                });
                self.on_record = on_record;
                self.unread = false;
            }
            Said::Written(on_record) => self.on_record = on_record,
            Said::Crd(None) => return ControlFlow::Break(()),
            Said::Crd(Some(uid)) => {
                edge_clusters.vanished = false;
                if let Some(register) = self
                    .register
                    .as_mut()
                    .filter(|register| register.crd != uid)
                {
                    tracing::warn!(
                        "the CRD of EdgeClusters was deleted, and with it all of them: every member comes back"
                    );
                    *register = Register::new(uid);
                }
            }
            Said::Failed => {
                self.unread = true;
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }
}

fn said(result: Result<Said, RegisterError>) -> Said {
    result.unwrap_or_else(|error| {
        tracing::warn!(error = %chain(&error), "writing the record of members failed; retrying");
        Said::Failed
    })
}
