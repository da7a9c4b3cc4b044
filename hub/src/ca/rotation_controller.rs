//! Watches the CA's Secret and, on the leader, performs the steps of a rotation.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::bound::list_all;
use krypton_runtime::call::call;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::periodic::{NextRun, Periodic, Schedule};
use krypton_types::ca_rotation::{
    BlockingMember, LOCK_OUT_ANNOTATION, READ_INTERVAL, REQUEST_ANNOTATION,
    ROTATION_STATE_ANNOTATION, RotationPhase, RotationRequest, RotationStage, RotationState,
    RotationStep, STEP_PAUSE, next,
};
use krypton_types::names::CA_SECRET;
use kube::Client;
use kube::api::{Api, ListParams, PostParams};
use tokio_util::sync::CancellationToken;

use crate::ca::{self, Authority, CurrentAuthority, SecretData, stage};
use crate::home_events::{HomeEvents, MemberEvent};
use crate::leader::Leader;

/// Jitter keeps two hubs from polling at the same moment.
const SCHEDULE: Schedule = Schedule {
    every: READ_INTERVAL,
    jitter: 0.2,
    retry_max: Duration::from_secs(60),
};
/// EdgeClusters per page. Each has a few kilobytes.
const PAGE: u32 = 500;

/// The error of a step that is not possible with the content of the Secret.
fn broken(problem: &'static str) -> anyhow::Error {
    anyhow!(
        "the rotation in Secret {CA_SECRET} cannot continue: {problem}; remove next.crt and next.key from it, also that certificate from its ca.crt, and start the rotation again"
    )
}

/// The inputs of the controller.
pub(crate) struct RotationController {
    pub client: Client,
    /// The hub's namespace.
    pub namespace: String,
    pub authority: Arc<CurrentAuthority>,
    /// Whether this hub writes on the home cluster.
    pub leader: Leader,
    pub events: HomeEvents,
}

/// State from earlier reads.
#[derive(Default)]
struct RotationMemory {
    /// resourceVersion of the Secret whose CA this hub uses.
    read_version: Option<String>,
    /// Whether this version of the Secret needs no step.
    is_steady: bool,
    /// The current stage, and since when.
    stage: Option<(RotationStage, BootTime)>,
    /// Names of the members that the rotation waits for, as logged.
    awaited: Vec<String>,
}

/// Polls the Secret until `stop`.
pub(crate) async fn run(controller: RotationController, stop: CancellationToken) {
    let mut leader = controller.leader.clone();
    let mut memory = RotationMemory::default();
    let mut pace = Periodic::new("checking the hub's CA", SCHEDULE);
    loop {
        let result = Box::pin(controller.reconcile(&mut memory)).await;
        tokio::select! {
            () = stop.cancelled() => return,
            // The previous leader may have changed the CA.
            true = leader.changed() => {}
            () = pace.pause_after(result.map(|()| NextRun::AsScheduled)) => {}
        }
    }
}

impl RotationController {
    async fn reconcile(&self, memory: &mut RotationMemory) -> anyhow::Result<()> {
        if let Some(validity) = self.authority.get().validity() {
            self.events.notifier().ca_expiry(validity);
        }
        let epoch = self.leader.leader_term().map(|term| term.epoch);
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let attempt = format!("reading Secret {}/{CA_SECRET}", self.namespace);
        let secret = call(attempt, api.get_opt(CA_SECRET)).await?;
        let mut secret = secret.with_context(|| format!(
            "Secret {CA_SECRET} is missing; restore it from a backup: this hub keeps its CA, but the next one would create another"
        ))?;
        let may_write = self.leader.may_write(BootTime::now());
        let mut data = secret.data.take().unwrap_or_default();
        let version = secret.metadata.resource_version.clone();
        if memory.read_version.is_none() || memory.read_version != version {
            self.use_authority(&data)?;
            (memory.read_version, memory.is_steady) = (version, false);
        }
        if let Some(epoch) = epoch {
            self.authority.confirm(epoch);
        }
        if memory.is_steady {
            // In a new leader term, this state is the baseline.
            self.events.notifier().ca_rotation(RotationPhase::Steady);
            return Ok(());
        }
        if !may_write {
            return Ok(());
        }
        let current = stage(&data).map_err(broken)?;
        self.events.notifier().ca_rotation(current.phase);
        let since = match memory.stage {
            Some((previous, since)) if previous == current => since,
            _ => BootTime::now(),
        };
        memory.stage = Some((current, since));
        let rotation_request = read_request(&secret);
        let is_rotating = current.phase != RotationPhase::Steady;
        let members = match is_rotating {
            true => self.members().await?,
            false => Vec::new(),
        };
        let now = clock::wall();
        let is_settled = BootTime::now().since(since) >= STEP_PAUSE;
        let step = next(current, &rotation_request, &members, is_settled, now);
        let locked_out = match step {
            RotationStep::Rest => {
                memory.is_steady = !is_rotating;
                memory.set_awaited(&[]);
                return Ok(());
            }
            RotationStep::Wait(members) => {
                memory.set_awaited(&members);
                return Ok(());
            }
            RotationStep::Announce => {
                data = ca::announce(&data, now).context("failed to create a new root")?;
                Vec::new()
            }
            RotationStep::Switch(members) => {
                data = ca::switch(&data).map_err(broken)?;
                members
            }
            RotationStep::Finish(members) => {
                data = ca::finish(&data).map_err(broken)?;
                members
            }
        };
        let reached = stage(&data).map_err(broken)?;
        annotate(&mut secret, reached, now);
        secret.data = Some(data.clone());
        let params = PostParams::default();
        // The leadership may have ended since the read.
        if !self.leader.may_write(BootTime::now()) {
            return Ok(());
        }
        // `secret` carries the resourceVersion that was read, so the write fails on a conflict.
        let request = api.replace(CA_SECRET, &params, &secret);
        let attempt = format!("writing Secret {}/{CA_SECRET}", self.namespace);
        match self.leader.tracked(call(attempt, request)).await {
            // A different hub or a user has changed the Secret. The next read handles the change.
            Err(error) if error.code() == Some(409) => return Ok(()),
            result => drop(result?),
        }
        tracing::info!(phase = %reached.phase, root = %reached.root, "CA rotation reached the next phase");
        memory.set_awaited(&[]);
        for member in locked_out {
            self.record_lock_out(&member);
        }
        memory.read_version = None;
        self.use_authority(&data)
    }

    /// Uses the CA in the Secret from now on.
    fn use_authority(&self, data: &SecretData) -> anyhow::Result<()> {
        let unusable = |problem: &str| {
            anyhow!(
                "Secret {CA_SECRET} is unusable, so this hub keeps its CA: {problem}; restore it"
            )
        };
        let authority = Authority::from_data(data, clock::wall()).map_err(unusable)?;
        ensure!(
            authority.trust_domain() == self.authority.get().trust_domain(),
            "the trust domain in Secret {CA_SECRET} has changed; restore it, or restart the hub"
        );
        if self.authority.replace(authority) {
            let current = self.authority.get();
            tracing::info!(roots = current.roots().len(), signing = ?current.signing_root(), "the hub's CA has changed");
        }
        Ok(())
    }

    async fn members(&self) -> anyhow::Result<Vec<EdgeCluster>> {
        let api: Api<EdgeCluster> = Api::all(self.client.clone());
        let params = ListParams::default().limit(PAGE);
        Ok(list_all(&api, "listing the EdgeClusters", params).await?)
    }

    fn record_lock_out(&self, member: &BlockingMember) {
        let name = &member.name;
        self.events.warn(MemberEvent {
            member: name.clone(),
            uid: member.uid.clone(),
            reason: "LockedOut",
            message: format!(
                "the hub's CA was rotated without it, as requested: {member}; run 'kubectl krypton join {name}' and enroll its agent again"
            ),
        });
    }
}

impl RotationMemory {
    /// Records the members that the rotation waits for, and logs each change.
    fn set_awaited(&mut self, members: &[BlockingMember]) {
        let names: Vec<String> = members.iter().map(|member| member.name.clone()).collect();
        if self.awaited == names {
            return;
        }
        if let Some(first) = members.first() {
            tracing::info!(members = names.len(), first = first.name, reason = %first,
                "CA rotation is waiting for members");
        }
        self.awaited = names;
    }
}

fn read_request(secret: &Secret) -> RotationRequest {
    let annotation = |key| secret.metadata.annotations.as_ref()?.get(key);
    let lock_out = annotation(LOCK_OUT_ANNOTATION).map(|text| serde_json::from_str(text));
    let lock_out = lock_out.transpose().unwrap_or_else(|error| {
        tracing::warn!(%error, annotation = LOCK_OUT_ANNOTATION, "ignoring an invalid lock-out annotation");
        None
    });
    RotationRequest {
        requested: annotation(REQUEST_ANNOTATION).is_some(),
        lock_out: lock_out.unwrap_or_default(),
    }
}

/// Records the stage in an annotation and removes the completed request.
fn annotate(secret: &mut Secret, stage: RotationStage, now: jiff::Timestamp) {
    let rotation_state = RotationState {
        phase: stage.phase,
        root: stage.root.to_string(),
        since: jiff::Timestamp::from_second(now.as_second()).unwrap_or(now),
    };
    let annotations = secret.metadata.annotations.get_or_insert_default();
    annotations.remove(REQUEST_ANNOTATION);
    if stage.phase != RotationPhase::Switched {
        annotations.remove(LOCK_OUT_ANNOTATION);
    }
    if let Ok(text) = serde_json::to_string(&rotation_state) {
        annotations.insert(ROTATION_STATE_ANNOTATION.to_owned(), text);
    }
}

#[cfg(test)]
mod tests;
