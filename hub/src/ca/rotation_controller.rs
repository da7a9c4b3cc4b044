//! Watches the CA's Secret and, on the leader, performs the steps of a rotation.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::periodic::{Next, Periodic, Schedule};
use krypton_types::ca_rotation::{
    Awaited, LOCK_OUT_ANNOTATION, LOOK_EVERY, Phase, REQUEST_ANNOTATION, ROTATION_STATE_ANNOTATION,
    RotationState, SETTLE, Stage, Step, Wishes, next,
};
use krypton_types::names::CA_SECRET;
use kube::Client;
use kube::api::{Api, ListParams, PostParams};
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use crate::ca::{self, Authority, AuthorityError, Data, Live, stage};
use crate::leader::Leader;
use crate::notices::{HomeEvents, MemberEvent};

/// Jitter keeps two hubs from polling at the same moment.
const SCHEDULE: Schedule = Schedule {
    every: LOOK_EVERY,
    jitter: 0.2,
    retry_max: Duration::from_secs(60),
};
/// EdgeClusters per page. Each has a few kilobytes.
const PAGE: u32 = 500;

#[derive(Debug, Error)]
enum RotationError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(
        "Secret {CA_SECRET} is missing; restore it from a backup: this hub keeps its CA, but the next one would create another"
    )]
    Gone,
    #[error("Secret {CA_SECRET} is unusable, so this hub keeps its CA: {0}; restore it")]
    Unusable(&'static str),
    #[error("the trust domain in Secret {CA_SECRET} has changed; restore it, or restart the hub")]
    TrustDomain,
    #[error(
        "the rotation in Secret {CA_SECRET} cannot continue: {0}; remove next.crt and next.key from it, and start the rotation again"
    )]
    Broken(&'static str),
    #[error("failed to create a new root")]
    Make(#[source] AuthorityError),
}

/// The inputs of the controller.
pub(crate) struct Rotation {
    pub client: Client,
    /// The hub's namespace.
    pub namespace: String,
    pub live: Arc<Live>,
    /// Whether this hub writes on the home cluster.
    pub lead: Leader,
    pub notices: HomeEvents,
}

impl std::fmt::Debug for Rotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rotation").finish_non_exhaustive()
    }
}

/// State from earlier reads.
#[derive(Default)]
struct Seen {
    /// resourceVersion of the Secret that needed no step.
    resting: Option<String>,
    /// The current stage, and since when.
    stage: Option<(Stage, BootTime)>,
    waited_for: Vec<String>,
}

/// Polls the Secret until `stop`.
pub(crate) async fn keep(rotation: Rotation, stop: CancellationToken) {
    let mut seen = Seen::default();
    let mut pace = Periodic::new("checking the hub's CA", SCHEDULE);
    loop {
        let done = Box::pin(rotation.look(&mut seen)).await;
        let rest = pace.rest(done.map(|()| Next::AsScheduled));
        if stop.run_until_cancelled(rest).await.is_none() {
            return;
        }
    }
}

impl Rotation {
    async fn look(&self, seen: &mut Seen) -> Result<(), RotationError> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let attempt = format!("reading Secret {}/{CA_SECRET}", self.namespace);
        let found = call(attempt, api.get_opt(CA_SECRET)).await?;
        let mut secret = found.ok_or(RotationError::Gone)?;
        let leads = self.lead.writes(BootTime::now());
        if seen.resting.is_some() && seen.resting == secret.metadata.resource_version {
            return Ok(());
        }
        let mut data = secret.data.take().unwrap_or_default();
        self.take_up(&data)?;
        if !leads {
            return Ok(());
        }
        let stood = stage(&data).map_err(RotationError::Broken)?;
        let since = match seen.stage {
            Some((before, since)) if before == stood => since,
            _ => BootTime::now(),
        };
        seen.stage = Some((stood, since));
        let wishes = wishes(&secret);
        let rotating = stood.phase != Phase::Steady;
        let members = match rotating {
            true => self.members().await?,
            false => Vec::new(),
        };
        let now = clock::wall();
        let settled = BootTime::now().since(since) >= SETTLE;
        let step = next(stood, &wishes, &members, settled, now);
        let locked_out = match step {
            Step::Rest => {
                if !rotating {
                    seen.resting = secret.metadata.resource_version;
                }
                seen.waits_for(&[]);
                return Ok(());
            }
            Step::Wait(members) => {
                seen.waits_for(&members);
                return Ok(());
            }
            Step::Announce => {
                data = ca::announced(&data, now).map_err(RotationError::Make)?;
                Vec::new()
            }
            Step::Switch(out) => {
                data = ca::switched(&data).map_err(RotationError::Broken)?;
                out
            }
            Step::Finish(out) => {
                data = ca::finished(&data).map_err(RotationError::Broken)?;
                out
            }
        };
        let stands = stage(&data).map_err(RotationError::Broken)?;
        mark(&mut secret, stands, now);
        secret.data = Some(data.clone());
        let params = PostParams::default();
        // The leadership may have ended since the read.
        if !self.lead.writes(BootTime::now()) {
            return Ok(());
        }
        // `secret` carries the resourceVersion that was read, so the write fails on a conflict.
        let request = api.replace(CA_SECRET, &params, &secret);
        let attempt = format!("writing Secret {}/{CA_SECRET}", self.namespace);
        match self.lead.tracked(call(attempt, request)).await {
            // A different hub or a user has changed the Secret. The next read handles the change.
            Err(error) if error.code() == Some(409) => return Ok(()),
            written => drop(written?),
        }
        tracing::info!(phase = %stands.phase, root = %stands.root, "CA rotation reached the next phase");
        seen.waits_for(&[]);
        for member in locked_out {
            self.tell(&member);
        }
        self.take_up(&data)
    }

    /// Uses the CA in the Secret from now on.
    fn take_up(&self, data: &Data) -> Result<(), RotationError> {
        let read = Authority::from_data(data, clock::wall()).map_err(RotationError::Unusable)?;
        if read.trust_domain() != self.live.now().trust_domain() {
            return Err(RotationError::TrustDomain);
        }
        if self.live.replace(read) {
            let now = self.live.now();
            tracing::info!(roots = now.roots().len(), signing = ?now.signing(), "the hub's CA has changed");
        }
        Ok(())
    }

    async fn members(&self) -> Result<Vec<EdgeCluster>, RotationError> {
        let api: Api<EdgeCluster> = Api::all(self.client.clone());
        let mut params = ListParams::default().limit(PAGE);
        let mut members = Vec::new();
        loop {
            let page = call("listing the EdgeClusters", api.list(&params)).await?;
            members.extend(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(members),
            }
        }
    }

    fn tell(&self, member: &Awaited) {
        let name = &member.name;
        self.notices.tell(MemberEvent {
            member: name.clone(),
            uid: member.uid.clone(),
            reason: "LockedOut",
            message: format!(
                "the hub's CA was rotated without it, as requested: {member}; run 'kubectl krypton join {name}' and enroll its agent again"
            ),
        });
    }
}

impl Seen {
    /// Logs the members that the rotation waits for, once for each change.
    fn waits_for(&mut self, members: &[Awaited]) {
        let names: Vec<String> = members.iter().map(|member| member.name.clone()).collect();
        if self.waited_for == names {
            return;
        }
        if let Some(first) = members.first() {
            tracing::info!(members = names.len(), first = first.name, why = %first,
                "the rotation of the CA waits; 'kubectl krypton rotate-ca --status' names all");
        }
        self.waited_for = names;
    }
}

fn wishes(secret: &Secret) -> Wishes {
    let annotation = |key| secret.metadata.annotations.as_ref()?.get(key);
    let lock_out = annotation(LOCK_OUT_ANNOTATION).map(|text| serde_json::from_str(text));
    let lock_out = lock_out.transpose().unwrap_or_else(|error| {
        tracing::warn!(%error, "annotation {LOCK_OUT_ANNOTATION} cannot be read; it locks out no member");
        None
    });
    Wishes {
        requested: annotation(REQUEST_ANNOTATION).is_some(),
        lock_out: lock_out.unwrap_or_default(),
    }
}

/// Records the stage in an annotation and removes the completed request.
fn mark(secret: &mut Secret, stage: Stage, now: jiff::Timestamp) {
    let rotation_state = RotationState {
        phase: stage.phase,
        root: stage.root.to_string(),
        since: jiff::Timestamp::from_second(now.as_second()).unwrap_or(now),
    };
    let annotations = secret.metadata.annotations.get_or_insert_default();
    annotations.remove(REQUEST_ANNOTATION);
    if stage.phase != Phase::Switched {
        annotations.remove(LOCK_OUT_ANNOTATION);
    }
    if let Ok(text) = serde_json::to_string(&rotation_state) {
        annotations.insert(ROTATION_STATE_ANNOTATION.to_owned(), text);
    }
}
