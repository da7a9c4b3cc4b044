//! Leases: whoever holds a member's `krypton-agent` is the one writer there (design §3, rules 4, 5).

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::clock::{self, Boot};
use crate::cluster;

/// Where Krypton keeps its own objects on a member.
pub const SYSTEM_NAMESPACE: &str = "krypton-system";
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
            name: "krypton-agent".to_owned(),
        }
    }
}
/// A Lease is dead when it has not been renewed for this long, by the watcher's own clock.
pub const DURATION: Duration = Duration::from_secs(60);
/// How often the holder renews.
pub const RENEW_EVERY: Duration = Duration::from_secs(15);
/// No helm run starts when the last renewal is older than this.
pub const NO_NEW_RUNS_AFTER: Duration = Duration::from_secs(30);
/// What runs is killed when the last renewal is older than this.
pub const KILL_AFTER: Duration = Duration::from_secs(45);
const CALL_DEADLINE: Duration = Duration::from_secs(8);
const RETRY: Duration = Duration::from_secs(3);

/// How the Lease stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    /// When it was last renewed by us; `None` when it is not ours.
    pub renewed: Option<Boot>,
    /// Who holds it, when somebody else does.
    pub other: Option<String>,
    /// When the apiserver last answered.
    pub heard: Option<Boot>,
    /// What went wrong in the last call.
    pub problem: Option<String>,
}

impl Hold {
    /// Whether a helm run may start.
    pub fn may_start(&self, now: Boot) -> bool {
        self.renewed
            .is_some_and(|renewed| now.since(renewed) < NO_NEW_RUNS_AFTER)
    }
}

/// What is wanted of the Lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseWish {
    /// To be the one writer.
    Hold,
    /// To know who is; nothing is written.
    Observe,
}

/// What is to be done about the Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Create,
    /// Write ourselves as the holder; on top of this version only.
    Take,
    Renew,
    /// Somebody else lives; look again later.
    Wait,
}

/// The Lease as last seen, and since when it has looked so.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sighting {
    holder: String,
    renew_time: Option<Timestamp>,
    transitions: i32,
    since: Boot,
}

impl Sighting {
    /// Two looks at the same renewal keep the time of the first: only our own clock counts.
    fn of(lease: &Lease, before: Option<&Self>, now: Boot) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let mut seen = Self {
            holder: spec.holder_identity.unwrap_or_default(),
            renew_time: spec.renew_time.map(|time| time.0),
            transitions: spec.lease_transitions.unwrap_or_default(),
            since: now,
        };
        if let Some(before) = before
            && (&before.holder, before.renew_time, before.transitions)
                == (&seen.holder, seen.renew_time, seen.transitions)
        {
            seen.since = before.since;
        }
        seen
    }
}

fn step(seen: Option<&Sighting>, me: &str, now: Boot) -> Step {
    match seen {
        None => Step::Create,
        Some(seen) if seen.holder == me => Step::Renew,
        Some(seen) if seen.holder.is_empty() => Step::Take,
        Some(seen) if now.since(seen.since) >= DURATION => Step::Take,
        Some(_) => Step::Wait,
    }
}

/// Keeps the Lease for `me` until `stop`, then gives it up; or only looks at it. A wish to hold it is not
/// taken back. Every change goes to `holds`.
///
/// `idle` must become true before the Lease is given up: it says that no helm run of ours lives.
pub async fn hold(
    client: Client,
    lease: LeaseName,
    me: String,
    mut wishes: watch::Receiver<LeaseWish>,
    holds: watch::Sender<Hold>,
    stop: CancellationToken,
    idle: CancellationToken,
) {
    let api: Api<Lease> = Api::namespaced(client.clone(), &lease.namespace);
    let mut current: Option<Lease> = None;
    let mut seen: Option<Sighting> = None;
    loop {
        let now = Boot::now();
        let wish = *wishes.borrow_and_update();
        let result = tokio::time::timeout(CALL_DEADLINE, async {
            match wish {
                LeaseWish::Hold => {
                    one_round(&client, &api, &lease, &me, &mut current, &mut seen, now).await
                }
                LeaseWish::Observe => look(&api, &lease, &mut seen, now).await,
            }
        })
        .await
        .unwrap_or_else(|_| Err(format!("no answer within {} s", CALL_DEADLINE.as_secs())));
        let pause = match (&result, wish) {
            (Ok(true), _) | (Ok(false), LeaseWish::Observe) => RENEW_EVERY,
            (Ok(false), LeaseWish::Hold) | (Err(_), _) => RETRY,
        };
        holds.send_if_modified(|hold| {
            let before = hold.clone();
            match &result {
                Ok(ours) => {
                    hold.renewed = ours.then_some(now);
                    hold.other = seen
                        .as_ref()
                        .filter(|seen| !ours && !seen.holder.is_empty())
                        .map(|seen| seen.holder.clone());
                    hold.heard = Some(now);
                    hold.problem = None;
                }
                // A failed renewal takes nothing away by itself: time does.
                Err(problem) => {
                    if hold.problem.is_none() {
                        let LeaseName { namespace, name } = &lease;
                        tracing::warn!(lease = %format_args!("{namespace}/{name}"), %problem, "seeing to the Lease failed; it is tried again");
                    }
                    hold.problem = Some(problem.clone());
                    if hold
                        .renewed
                        .is_some_and(|renewed| now.since(renewed) >= KILL_AFTER)
                    {
                        hold.renewed = None;
                    }
                }
            }
            *hold != before
        });
        tokio::select! {
            () = stop.cancelled() => break,
            Ok(()) = wishes.changed() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
    idle.cancelled().await;
    if let Some(lease) = current.filter(|_| holds.borrow().renewed.is_some()) {
        let released = spec_of(&lease, "", clock::wall());
        let write = replace(&api, lease, released);
        if let Ok(Err(error)) = tokio::time::timeout(CALL_DEADLINE, write).await {
            tracing::warn!(%error, "giving up the Lease failed; it runs out by itself");
        }
    }
    holds.send_replace(Hold::default());
}

/// One look and at most one write. Says whether the Lease is ours afterwards.
async fn one_round(
    client: &Client,
    api: &Api<Lease>,
    name: &LeaseName,
    me: &str,
    current: &mut Option<Lease>,
    seen: &mut Option<Sighting>,
    now: Boot,
) -> Result<bool, String> {
    // Holding it, the version we wrote last is the precondition, and no read is needed.
    let held = seen.as_ref().is_some_and(|seen| seen.holder == me) && current.is_some();
    if !held {
        *current = api
            .get_opt(&name.name)
            .await
            .map_err(|error| error.to_string())?;
        *seen = current
            .as_ref()
            .map(|lease| Sighting::of(lease, seen.as_ref(), now));
    }
    let written = match step(seen.as_ref(), me, now) {
        Step::Wait => return Ok(false),
        Step::Create => {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(name.name.clone()),
                    ..ObjectMeta::default()
                },
                spec: Some(spec_of(&Lease::default(), me, clock::wall())),
            };
            match api.create(&PostParams::default(), &lease).await {
                // Who may not make namespaces does where this one is there.
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    ensure_namespace(client, &name.namespace).await?;
                    api.create(&PostParams::default(), &lease).await
                }
                created => created,
            }
        }
        Step::Take | Step::Renew => {
            let Some(lease) = current.take() else {
                return Ok(false);
            };
            let spec = spec_of(&lease, me, clock::wall());
            replace(api, lease, spec).await
        }
    };
    match written {
        Ok(lease) => {
            *seen = Some(Sighting::of(&lease, seen.as_ref(), now));
            *current = Some(lease);
            Ok(true)
        }
        Err(error) => {
            // Whatever it was, the next round reads afresh.
            *current = None;
            match error {
                kube::Error::Api(status) if status.code == 409 => Ok(false),
                other => Err(other.to_string()),
            }
        }
    }
}

/// One look without a write. The Lease is never ours afterwards.
async fn look(
    api: &Api<Lease>,
    name: &LeaseName,
    seen: &mut Option<Sighting>,
    now: Boot,
) -> Result<bool, String> {
    let found = api
        .get_opt(&name.name)
        .await
        .map_err(|error| error.to_string())?;
    *seen = found
        .as_ref()
        .map(|lease| Sighting::of(lease, seen.as_ref(), now));
    Ok(false)
}

async fn replace(api: &Api<Lease>, lease: Lease, spec: LeaseSpec) -> kube::Result<Lease> {
    // `metadata.resourceVersion` of what was read makes this conditional.
    let name = lease.metadata.name.clone().unwrap_or_default();
    let next = Lease {
        spec: Some(spec),
        ..lease
    };
    api.replace(&name, &PostParams::default(), &next).await
}

fn spec_of(lease: &Lease, holder: &str, now: Timestamp) -> LeaseSpec {
    let before = lease.spec.clone().unwrap_or_default();
    let same = before.holder_identity.as_deref() == Some(holder);
    let transitions = before.lease_transitions.unwrap_or_default();
    LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
        acquire_time: if same {
            before.acquire_time
        } else {
            Some(MicroTime(now))
        },
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(if same || holder.is_empty() {
            transitions
        } else {
            transitions + 1
        }),
        ..LeaseSpec::default()
    }
}

async fn ensure_namespace(client: &Client, name: &str) -> Result<(), String> {
    match Api::all(client.clone())
        .create(&PostParams::default(), &cluster::own_namespace(name))
        .await
    {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(format!("creating namespace {name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, renewed: i64) -> Lease {
        Lease {
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        }
    }

    fn at(seconds: u64) -> Boot {
        Boot(Duration::from_secs(seconds))
    }

    #[test]
    fn a_live_holder_is_never_robbed_however_wrong_its_clock_is() {
        let mut seen = None;
        for second in 0..600 {
            // The other's clock is years behind, but it renews every 15 s.
            let renewed = 1_000 + i64::try_from(second / 15).unwrap();
            seen = Some(Sighting::of(
                &lease("other", renewed),
                seen.as_ref(),
                at(second),
            ));
            assert_eq!(
                step(seen.as_ref(), "me", at(second)),
                Step::Wait,
                "second {second}"
            );
        }
    }

    #[test]
    fn a_holder_that_stops_renewing_is_followed_after_the_lease_duration() {
        let first = Sighting::of(&lease("other", 5), None, at(100));
        let second = Sighting::of(&lease("other", 5), Some(&first), at(159));
        assert_eq!(step(Some(&second), "me", at(159)), Step::Wait);
        assert_eq!(step(Some(&second), "me", at(160)), Step::Take);
    }

    #[test]
    fn a_released_lease_is_taken_at_once_and_our_own_is_renewed() {
        let released = Sighting::of(&lease("", 5), None, at(1));
        assert_eq!(step(Some(&released), "me", at(1)), Step::Take);
        let ours = Sighting::of(&lease("me", 5), None, at(1));
        assert_eq!(step(Some(&ours), "me", at(500)), Step::Renew);
        assert_eq!(step(None, "me", at(1)), Step::Create);
    }

    #[test]
    fn runs_stop_starting_half_a_lease_after_the_last_renewal() {
        let hold = Hold {
            renewed: Some(at(10)),
            ..Hold::default()
        };
        assert!(hold.may_start(at(39)));
        assert!(!hold.may_start(at(40)));
        assert!(!Hold::default().may_start(at(0)));
    }

    #[test]
    fn transitions_count_changes_of_the_holder_only() {
        let now = Timestamp::from_second(9).unwrap();
        let taken = spec_of(&lease("other", 5), "me", now);
        assert_eq!(taken.lease_transitions, Some(1));
        let renewed = spec_of(
            &Lease {
                spec: Some(taken),
                ..Lease::default()
            },
            "me",
            now,
        );
        assert_eq!(renewed.lease_transitions, Some(1));
    }
}
