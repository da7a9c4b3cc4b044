//! Leases: the holder of a member's Lease `krypton-agent` is the only writer on that member.

mod holder;
#[cfg(test)]
mod leader_model;
pub mod state;
mod times;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::call::{ApiError, call_within};
use crate::clock::{self, BootTime};
use crate::cluster;
use crate::newest::{NewestSeen as _, SendIfChanged as _};
use state::{LeaseRequest, LeaseResponse, LeaseStateMachine};

pub use holder::{OwnPod, agent_holder};
pub use state::{LeaseGoal, LeaseState, LeaseTerm};
pub use times::{DURATION, KILL_AFTER, LeaseTimes, NO_NEW_RUNS_AFTER};

/// Namespace of Krypton's own objects on a member.
pub const SYSTEM_NAMESPACE: &str = "krypton-system";
/// Name of a member's Lease in that namespace.
pub const LEASE_NAME: &str = "krypton-agent";
/// Name of a Lease. Krypton creates its namespace if it is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

impl LeaseName {
    /// Returns the name of a member's Lease, whose holder is the only writer on the member.
    pub fn member() -> Self {
        Self {
            namespace: SYSTEM_NAMESPACE.to_owned(),
            name: LEASE_NAME.to_owned(),
        }
    }
}

/// Holds the Lease for `me` until `stop` and then releases it, or only observes it. Once requested, holding
/// stays the goal. All processes that share a Lease must use the same `times`, or longer ones. Sends every
/// change to `state_tx`.
///
/// `idle` must become true before the release: it means that no Helm run of this process is alive.
pub async fn hold(
    client: Client,
    (name, times): (LeaseName, LeaseTimes),
    me: String,
    mut goal_updates: watch::Receiver<LeaseGoal>,
    state_tx: watch::Sender<LeaseState>,
    stop: CancellationToken,
    idle: CancellationToken,
) {
    let api = LeaseApi {
        api: Api::namespaced(client.clone(), &name.namespace),
        client,
        name,
        times,
    };
    let mut machine = LeaseStateMachine::new(me, times);
    loop {
        let goal = goal_updates.get_and_update();
        let was_healthy = machine.state().problem.is_none();
        let result = api.round(&mut machine, goal, &state_tx).await;
        let now = BootTime::now();
        if let Err(error) = result {
            let problem = chain(&error);
            if was_healthy {
                let LeaseName { namespace, name } = &api.name;
                tracing::warn!(lease = %format_args!("{namespace}/{name}"), %problem, "failed to renew or read the Lease; retrying");
            }
            machine.handle_error(problem, now);
        }
        state_tx.send_if_changed(machine.state().clone());
        tokio::select! {
            () = stop.cancelled() => break,
            Ok(()) = goal_updates.changed() => {}
            () = tokio::time::sleep(machine.pause(goal, now)) => {}
        }
    }
    idle.cancelled().await;
    if let Some(lease) = machine.release(clock::wall()) {
        let write = api.replace(&lease);
        if let Err(error) = call_within(times.call_timeout, "giving up the Lease", write).await {
            tracing::warn!(error = %chain(&error), "failed to release the Lease; it expires later");
        }
    }
    state_tx.send_replace(LeaseState::default());
}

/// API client of the Lease.
struct LeaseApi {
    client: Client,
    api: Api<Lease>,
    name: LeaseName,
    times: LeaseTimes,
}

impl LeaseApi {
    async fn round(
        &self,
        machine: &mut LeaseStateMachine,
        goal: LeaseGoal,
        state_tx: &watch::Sender<LeaseState>,
    ) -> Result<(), ApiError> {
        let mut next_request = Some(machine.start_round(goal, BootTime::now(), clock::wall()));
        while let Some(request) = next_request {
            let sent_at = BootTime::now();
            let LeaseName { namespace, name } = &self.name;
            let attempt = format!("request for Lease {namespace}/{name}");
            let response =
                call_within(self.times.call_timeout, attempt, self.send(request)).await?;
            next_request =
                machine.handle_response(goal, response, (sent_at, BootTime::now()), clock::wall());
            state_tx.send_if_changed(machine.state().clone());
        }
        Ok(())
    }

    async fn send(&self, request: LeaseRequest) -> kube::Result<LeaseResponse> {
        let name = &self.name.name;
        let written = match request {
            LeaseRequest::Read => {
                let lease = self.api.get_opt(name).await?;
                return Ok(LeaseResponse::Read(lease.map(Box::new)));
            }
            LeaseRequest::Create(spec) => {
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(name.clone()),
                        ..ObjectMeta::default()
                    },
                    spec: Some(spec),
                };
                match self.create(&lease).await {
                    // A process without the right to create namespaces needs none if the namespace exists.
                    Err(kube::Error::Api(status)) if status.code == 404 => {
                        let namespace = &self.name.namespace;
                        cluster::ensure_own_namespace(&self.client, namespace).await?;
                        self.create(&lease).await
                    }
                    created => created,
                }
            }
            LeaseRequest::Replace(lease) => match self.replace(&lease).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    return Ok(LeaseResponse::Conflict);
                }
                replaced => replaced,
            },
        };
        match written {
            Ok(lease) => Ok(LeaseResponse::Written(Box::new(lease))),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(LeaseResponse::Conflict),
            Err(error) => Err(error),
        }
    }

    async fn create(&self, lease: &Lease) -> kube::Result<Lease> {
        let params = PostParams::default();
        self.api.create(&params, lease).await
    }

    /// The `metadata.resourceVersion` of the read Lease is the precondition.
    async fn replace(&self, lease: &Lease) -> kube::Result<Lease> {
        let name = &self.name.name;
        self.api.replace(name, &PostParams::default(), lease).await
    }
}
