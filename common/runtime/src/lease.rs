//! Leases: whoever holds a member's `krypton-agent` is the one writer there.

mod holder;
#[cfg(test)]
mod leader_model;
pub mod state;
mod times;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::clock::{self, BootTime};
use crate::newest::{NewestSeen as _, PutNews as _};
use crate::{cluster, effect};
use state::{Actor, Answer, Call};

use holder::is_former_life;
pub use holder::{OwnPod, agent_holder};
pub use times::Times;

/// Where Krypton keeps its own objects on a member.
pub const SYSTEM_NAMESPACE: &str = "krypton-system";
/// The Lease of a member there.
pub const LEASE_NAME: &str = "krypton-agent";
/// Which Lease. Its namespace is made when it is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

impl LeaseName {
    /// The one on a member: its holder is the one writer there.
    pub fn of_member() -> Self {
        Self {
            namespace: SYSTEM_NAMESPACE.to_owned(),
            name: LEASE_NAME.to_owned(),
        }
    }
}
/// A member's Lease is dead when it has not been renewed for this long, by the watcher's own clock.
pub const DURATION: Duration = Times::MEMBER.duration;
/// No helm run starts when the last renewal is older than this.
pub const NO_NEW_RUNS_AFTER: Duration = Times::MEMBER.fresh;
/// What runs is killed when the last renewal is older than this.
pub const KILL_AFTER: Duration = Times::MEMBER.keep;

/// A tenure of a Lease: its UID, as it may be deleted and made anew, and its count of transitions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseTerm {
    pub lease: String,
    pub transitions: i32,
}

/// How the Lease stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// When it was last renewed by us; `None` when it is not ours.
    pub renewed: Option<BootTime>,
    /// Which tenure of ours that is: one that was lost and won again is another.
    pub term: Option<LeaseTerm>,
    /// Who holds it, when somebody else does.
    pub other: Option<String>,
    /// When the apiserver last answered.
    pub heard: Option<BootTime>,
    /// What went wrong in the last call.
    pub problem: Option<String>,
}

impl LeaseState {
    /// Whether a helm run may start, under a member's Lease.
    pub fn may_start(&self, now: BootTime) -> bool {
        self.is_fresh(now, &Times::MEMBER)
    }

    /// Whether what the Lease guards may be begun: nobody else can hold it yet.
    pub fn is_fresh(&self, now: BootTime, times: &Times) -> bool {
        self.renewed
            .is_some_and(|renewed| now.since(renewed) < times.fresh)
    }

    /// Until when what runs may live, if it may at all.
    pub fn runs_until(&self, now: BootTime) -> Option<BootTime> {
        let until = BootTime(self.renewed?.0 + KILL_AFTER);
        (now < until).then_some(until)
    }
}

/// What is wanted of the Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseGoal {
    /// To be the one writer.
    Hold,
    /// To know who is; nothing is written.
    Observe,
}

/// Keeps the Lease for `me` until `stop`, then gives it up; or only looks at it. A wish to hold it is not
/// taken back. All who share a Lease keep the same `times`, or longer ones. Every change goes to `holds`.
///
/// `idle` must become true before the Lease is given up: it says that no helm run of ours lives.
pub async fn hold(
    client: Client,
    (lease, times): (LeaseName, Times),
    me: String,
    mut wishes: watch::Receiver<LeaseGoal>,
    holds: watch::Sender<LeaseState>,
    stop: CancellationToken,
    idle: CancellationToken,
) {
    let rim = LeaseApi {
        api: Api::namespaced(client.clone(), &lease.namespace),
        client,
        lease,
        times,
    };
    let mut actor = Actor::new(me, times);
    loop {
        let wish = wishes.see();
        let well = actor.hold().problem.is_none();
        let ended = rim.round(&mut actor, wish, &holds).await;
        let now = BootTime::now();
        if let Err(problem) = ended {
            if well {
                let LeaseName { namespace, name } = &rim.lease;
                tracing::warn!(lease = %format_args!("{namespace}/{name}"), %problem, "seeing to the Lease failed; it is tried again");
            }
            actor.failed(problem, now);
        }
        publish(&actor, &holds);
        tokio::select! {
            () = stop.cancelled() => break,
            Ok(()) = wishes.changed() => {}
            () = tokio::time::sleep(actor.pause(wish, now)) => {}
        }
    }
    idle.cancelled().await;
    if let Some(lease) = actor.release(clock::wall()) {
        let write = effect!("lease.give-up", rim.replace(&lease));
        if let Ok(Err(error)) = tokio::time::timeout(times.call, write).await {
            tracing::warn!(%error, "giving up the Lease failed; it runs out by itself");
        }
    }
    holds.send_replace(LeaseState::default());
}

fn publish(actor: &Actor, holds: &watch::Sender<LeaseState>) {
    holds.put(actor.hold().clone());
}

/// Where the calls are made.
struct LeaseApi {
    client: Client,
    api: Api<Lease>,
    lease: LeaseName,
    times: Times,
}

impl LeaseApi {
    async fn round(
        &self,
        actor: &mut Actor,
        wish: LeaseGoal,
        holds: &watch::Sender<LeaseState>,
    ) -> Result<(), String> {
        let mut next = Some(actor.begin(wish, BootTime::now(), clock::wall()));
        while let Some(call) = next {
            let asked = BootTime::now();
            let answer = tokio::time::timeout(self.times.call, self.ask(call))
                .await
                .map_err(|_| format!("no answer within {} s", self.times.call.as_secs_f32()))??;
            next = actor.answered(wish, answer, (asked, BootTime::now()), clock::wall());
            publish(actor, holds);
        }
        Ok(())
    }

    async fn ask(&self, call: Call) -> Result<Answer, String> {
        let name = &self.lease.name;
        let written = match call {
            Call::Read => {
                let found = self.api.get_opt(name).await;
                let found = found.map_err(|error| error.to_string())?;
                return Ok(Answer::Found(found.map(Box::new)));
            }
            Call::Create(spec) => {
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(name.clone()),
                        ..ObjectMeta::default()
                    },
                    spec: Some(spec),
                };
                match self.create(&lease).await {
                    // Who may not make namespaces does where this one is there.
                    Err(kube::Error::Api(status)) if status.code == 404 => {
                        ensure_namespace(&self.client, &self.lease.namespace).await?;
                        self.create(&lease).await
                    }
                    created => created,
                }
            }
            Call::Replace(lease) => match effect!("lease.write", self.replace(&lease)).await {
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    return Ok(Answer::Overtaken);
                }
                replaced => replaced,
            },
        };
        match written {
            Ok(lease) => Ok(Answer::Written(Box::new(lease))),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Answer::Overtaken),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn create(&self, lease: &Lease) -> kube::Result<Lease> {
        let params = PostParams::default();
        effect!("lease.create", self.api.create(&params, lease)).await
    }

    /// `metadata.resourceVersion` of what was read makes this conditional.
    async fn replace(&self, lease: &Lease) -> kube::Result<Lease> {
        let name = &self.lease.name;
        self.api.replace(name, &PostParams::default(), lease).await
    }
}

async fn ensure_namespace(client: &Client, name: &str) -> Result<(), String> {
    let (params, namespace) = (PostParams::default(), cluster::own_namespace(name));
    let api = Api::all(client.clone());
    match effect!("lease.namespace", api.create(&params, &namespace)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(format!("creating namespace {name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime(Duration::from_secs(seconds))
    }

    #[test]
    fn runs_stop_starting_half_lease_after_renewal() {
        let hold = LeaseState {
            renewed: Some(at(10)),
            ..LeaseState::default()
        };
        assert!(hold.may_start(at(39)));
        assert!(!hold.may_start(at(40)));
        assert!(!LeaseState::default().may_start(at(0)));
    }
}
