//! The register of members at work: read before anybody is made a member, kept current, and void when
//! the CRD of EdgeClusters was made anew.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use krypton_agent::clock::Boot;
use krypton_common::error_chain::chain;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::edge_clusters::EdgeClusters;
use super::{AFTER_FAILURE, PACE};
use crate::discovery::register::{self, Entry, OnRecord, Register, RegisterError};
use crate::discovery::{Found, Origin, Sources};

/// The register, as it is on record and as it is to be.
pub(super) struct Book {
    client: Client,
    /// The hub's.
    namespace: String,
    sources: watch::Receiver<Sources>,
    /// `None` until it is read.
    on_record: Option<OnRecord>,
    /// Sources that were away since that was written, and those of them that are being written.
    departed: BTreeSet<Origin>,
    departing: BTreeSet<Origin>,
    /// One call at a time.
    call: JoinSet<Said>,
    not_before: Boot,
    led: bool,
}

/// What came of a call.
enum Said {
    Here(OnRecord),
    /// UID of the CRD of EdgeClusters, if it is there to stay.
    Crd(Option<String>),
    Failed,
}

impl Book {
    pub(super) fn new(
        client: Client,
        namespace: String,
        sources: watch::Receiver<Sources>,
    ) -> Self {
        Self {
            client,
            namespace,
            sources,
            on_record: None,
            departed: BTreeSet::new(),
            departing: BTreeSet::new(),
            call: JoinSet::new(),
            not_before: Boot::default(),
            led: false,
        }
    }

    /// Who has been a member is known: one that was dismissed is not made one again.
    pub(super) fn is_read(&self) -> bool {
        self.on_record.is_some()
    }

    /// Sources that are to be no members.
    pub(super) fn dismissed(&self, edge_clusters: &EdgeClusters) -> BTreeSet<Entry> {
        let on_record = self.on_record.as_ref();
        let dismissed =
            on_record.map(|on_record| on_record.register.dismissed(&edge_clusters.bound()));
        dismissed.unwrap_or_default()
    }

    /// Makes the next call, if one is due; says when to come again.
    pub(super) fn work(
        &mut self,
        edge_clusters: &mut EdgeClusters,
        leading: bool,
        now: Boot,
    ) -> Option<Boot> {
        if leading && !self.led {
            // Another hub may have written it meanwhile.
            self.on_record = None;
        }
        self.led = leading;
        if now < self.not_before {
            return Some(self.not_before);
        }
        if !self.call.is_empty() {
            return None;
        }
        let (client, namespace) = (self.client.clone(), self.namespace.clone());
        let Some(on_record) = &self.on_record else {
            self.call.spawn(async move {
                said(register::load(client, &namespace).await.map(Said::Here))
            });
            return None;
        };
        if std::mem::take(&mut edge_clusters.vanished) {
            self.call
                .spawn(async move { said(register::crd(client, &namespace).await.map(Said::Crd)) });
            return None;
        }
        if !leading || !edge_clusters.synced {
            return None;
        }
        let sources = self.sources.borrow();
        self.departed.extend(sources.take_departed());
        let departed = std::mem::take(&mut self.departed);
        let found: Vec<&Found> = sources.iter().collect();
        let next = on_record
            .register
            .next(&found, &departed, &edge_clusters.bound());
        if next == on_record.register {
            return None;
        }
        let before = on_record.clone();
        self.departing = departed;
        self.not_before = Boot(now.0 + PACE);
        self.call.spawn(async move {
            said(
                register::save(client, &namespace, &before, next)
                    .await
                    .map(Said::Here),
            )
        });
        Some(self.not_before)
    }

    /// Waits for the end of a call; for ever when there is none.
    pub(super) async fn answered(&mut self, edge_clusters: &mut EdgeClusters) {
        let Some(said) = self.call.join_next().await else {
            return std::future::pending().await;
        };
        if self
            .take(said.unwrap_or(Said::Failed), edge_clusters)
            .is_break()
        {
            let pause = AFTER_FAILURE.mul_f64(0.5 + rand::random::<f64>());
            self.not_before = Boot(Boot::now().0 + pause);
        }
    }

    /// `Break` when it is to be tried again after a while.
    fn take(&mut self, said: Said, edge_clusters: &mut EdgeClusters) -> ControlFlow<()> {
        match said {
            Said::Here(on_record) => {
                self.on_record = Some(on_record);
                self.departing.clear();
            }
            Said::Crd(uid) => {
                let Some(on_record) = &mut self.on_record else {
                    return ControlFlow::Continue(());
                };
                if uid.as_ref() == Some(&on_record.register.crd) {
                    return ControlFlow::Continue(());
                }
                tracing::warn!(
                    "the CRD of EdgeClusters was deleted, and with it all of them: every member comes back"
                );
                on_record.register = Register {
                    crd: uid.clone().unwrap_or_default(),
                    ..Register::default()
                };
                if uid.is_none() {
                    // Until there is one again.
                    edge_clusters.vanished = true;
                    return ControlFlow::Break(());
                }
            }
            // Another hub may have written it: it is read again.
            Said::Failed => {
                self.on_record = None;
                let departing = std::mem::take(&mut self.departing);
                self.departed.extend(departing);
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }
}

fn said(result: Result<Said, RegisterError>) -> Said {
    result.unwrap_or_else(|error| {
        tracing::warn!(error = %chain(&error), "the register of members is not up to date; it is tried again");
        Said::Failed
    })
}
