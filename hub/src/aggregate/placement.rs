//! Tenants of home that name another member: what is ordered of that member, what is done to the Tenant at
//! home, and the condition `Placed`. Pure.

use jiff::Timestamp;
use krypton_agent::placement::placed_on;
use krypton_agent::plan::PREVIOUS_UID_ANNOTATION;
use krypton_common::conditions::{self, State, Truth, reason};
use krypton_common::names::{
    ADOPT_ANNOTATION, ORPHAN_ANNOTATION, PAUSED_ANNOTATION, RECONCILE_REQUESTED_ANNOTATION,
    SELF_CLUSTER,
};
use krypton_common::placed::{PlacedReport, PlacedSpec, PlacedTenant};
use krypton_crds::tenant::{Tenant, TenantStatus};
use kube::ResourceExt;

use super::reports::{Heard, Hearing, Targets};

/// What a decision rests on, beside the Tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    /// The hub places Tenants.
    pub(super) place: bool,
    /// `None` until the EdgeClusters are known.
    pub(super) targets: Option<&'a Targets>,
    /// Why the member is not heard.
    pub(super) silent: Option<&'a str>,
    /// Its newest word on the order.
    pub(super) said: Option<&'a PlacedReport>,
    /// It has no room for the order.
    pub(super) left_out: bool,
    /// Of one that is deleted: what a fresh look at the CRD has shown since.
    pub(super) deletion: Deletion,
}

/// Why a Tenant of home goes. With its CRD go all, and nobody has wanted that of any of them (design §3,
/// rule 2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Deletion {
    #[default]
    NotKnown,
    /// It was deleted while the CRD was whole.
    Its,
    /// The CRD is being deleted, and whoever looks after home as a member keeps its Tenants and puts them
    /// back.
    OfTheCrd,
    /// The same, and nobody does.
    OfTheCrdForGood,
}

/// What is done to the Tenant at home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// It gets the finalizer, and is on record as placed on this member: only then an order is given.
    Begin(String),
    /// It is let go; `orphaned` says what stays where.
    End {
        orphaned: Option<String>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) step: Step,
    /// The condition; `None` takes it away.
    pub(super) placed: Option<State>,
}

/// What is ordered, and of which member. Computed from a Tenant that was read with its finalizer: whoever
/// deletes it from then on waits for the member.
pub(super) fn order(
    tenant: &Tenant,
    targets: &Targets,
    deletion: Deletion,
) -> Option<(String, PlacedTenant)> {
    let member = placed_on(tenant).filter(|member| !member.is_empty())?;
    let remove = tenant.metadata.deletion_timestamp.is_some();
    // Its place is given up by the annotation alone.
    if remove && (orphaned(tenant) || deletion != Deletion::Its) {
        return None;
    }
    // What was placed while it was allowed is removed all the same.
    if !remove && refused(tenant, member, targets).is_some() {
        return None;
    }
    let annotations = tenant.annotations();
    let on = |name: &str| annotations.get(name).map(String::as_str);
    let spec = PlacedSpec {
        workspace: tenant.spec.workspace.clone(),
        values: tenant.spec.values.clone(),
    };
    let order = PlacedTenant {
        namespace: tenant.namespace().unwrap_or_default(),
        name: tenant.name_any(),
        uid: tenant.uid().unwrap_or_default(),
        former_uid: on(PREVIOUS_UID_ANNOTATION).map(str::to_owned),
        generation: tenant.metadata.generation.unwrap_or_default(),
        spec: if remove { PlacedSpec::default() } else { spec },
        remove,
        adopt: on(ADOPT_ANNOTATION) == Some("true"),
        paused: on(PAUSED_ANNOTATION).is_some_and(|value| value != "false"),
        requested: on(RECONCILE_REQUESTED_ANNOTATION).map(str::to_owned),
    };
    Some((member.to_owned(), order))
}

/// The member that the Tenant is placed on, or is to be.
pub(super) fn member(tenant: &Tenant) -> Option<&str> {
    let named = || tenant.names_member().filter(|name| *name != SELF_CLUSTER);
    placed_on(tenant).or_else(named)
}

/// Why the member is not heard, as long as it is to be heard by now.
pub(super) fn silent<'a>(heard: &'a Heard, member: &str) -> Option<&'a str> {
    let saying = heard.said.get(member)?;
    match &saying.hearing {
        Hearing::Silent(why) => Some(why),
        Hearing::NotYet if !saying.patient => Some("it has said nothing since the hub was started"),
        Hearing::NotYet | Hearing::Full => None,
    }
}

/// Puts the condition into the status that was made of what members say.
pub(super) fn put(
    status: &mut TenantStatus,
    placed: Option<&State>,
    generation: i64,
    now: Timestamp,
) {
    let all = &mut status.conditions;
    let Some(placed) = placed else {
        conditions::remove(all, conditions::PLACED);
        return;
    };
    conditions::set(all, conditions::PLACED, placed, generation, now);
    // Where no member says anything of it, this is why.
    if let Some(ready) = conditions::find(all, conditions::READY)
        && ready.reason == reason::NO_CLUSTERS
    {
        let ready = State::new(ready.truth, ready.reason, placed.message.clone());
        conditions::set(all, conditions::READY, &ready, generation, now);
        status.last_message = Some(ready.message);
    }
}

pub(super) fn decide(tenant: &Tenant, view: &View<'_>) -> Verdict {
    match (placed_on(tenant), member(tenant)) {
        (Some(member), _) => placed(tenant, member, view),
        (None, Some(member)) if view.place => to_be_placed(tenant, member, view),
        // As ever: somebody makes it on the member, or nobody does.
        _ => said(None),
    }
}

fn to_be_placed(tenant: &Tenant, member: &str, view: &View<'_>) -> Verdict {
    let Some(targets) = view.targets else {
        return said(recorded(tenant));
    };
    if tenant.metadata.deletion_timestamp.is_some() {
        return said(recorded(tenant));
    }
    match refused(tenant, member, targets) {
        Some(refused) => said(Some(refused)),
        None => Verdict {
            step: Step::Begin(member.to_owned()),
            placed: Some(waits(member)),
        },
    }
}

fn placed(tenant: &Tenant, member: &str, view: &View<'_>) -> Verdict {
    let deleted = tenant.metadata.deletion_timestamp.is_some();
    if deleted && orphaned(tenant) {
        let message = format!(
            "let go by annotation {ORPHAN_ANNOTATION}: what was placed on {member} stays there, with its release"
        );
        return Verdict {
            step: Step::End {
                orphaned: Some(message.clone()),
            },
            placed: Some(State::new(Truth::False, reason::DELETING, message)),
        };
    }
    if deleted && view.deletion == Deletion::OfTheCrdForGood {
        let message = format!(
            "the CRD of Tenants is being deleted at home: what was placed on {member} stays there"
        );
        return Verdict {
            step: Step::End {
                orphaned: Some(message.clone()),
            },
            placed: Some(State::new(Truth::False, reason::DELETING, message)),
        };
    }
    let way_out = || match deleted {
        true => format!("; deletion waits, until then or annotation {ORPHAN_ANNOTATION}=true"),
        false => String::new(),
    };
    let unknown = |why: &str, message: String| {
        let message = format!("{message}{}", way_out());
        said(Some(State::new(Truth::Unknown, why, message)))
    };
    if !view.place {
        let message = format!(
            "the hub runs without --place-tenants: what was placed on {member} stays as it is, and is looked after there"
        );
        return unknown(reason::NOT_PLACING, message);
    }
    let Some(targets) = view.targets else {
        return said(recorded(tenant));
    };
    let mine = view
        .said
        .filter(|said| Some(said.uid.as_str()) == tenant.metadata.uid.as_deref());
    if deleted && view.deletion == Deletion::Its && mine.is_some_and(|said| said.gone) {
        let state = mine.map(|said| said.state.clone());
        let anothers = state
            .as_ref()
            .filter(|state| state.reason == reason::BELONGS_TO_ANOTHER);
        return Verdict {
            step: Step::End {
                orphaned: anothers.map(|state| format!("{member}: {}", state.message)),
            },
            placed: state,
        };
    }
    if !targets.contains_key(member) {
        let message = format!(
            "there is no EdgeCluster {member} any more; what was placed there stays, until it is back"
        );
        return unknown(reason::MEMBER_LEFT, message);
    }
    if !deleted {
        if tenant.names_member() != Some(member) {
            let message = format!(
                "clusterRef names {} now, and cannot be changed once the Tenant is placed: it stays on {member}; put clusterRef back, or delete the Tenant and create it anew",
                tenant.names_member().unwrap_or("nobody")
            );
            let changed = State::new(Truth::False, reason::CLUSTER_REF_CHANGED, message);
            return said(Some(changed));
        }
        if let Some(refused) = refused(tenant, member, targets) {
            return said(Some(refused));
        }
    }
    if view.left_out {
        let message = format!(
            "{member} has as many placed Tenants as it is given at most, or they are too large; what there is of this one stays"
        );
        return said(Some(State::new(Truth::False, reason::TOO_MANY, message)));
    }
    if let Some(why) = view.silent {
        return unknown(
            reason::CLUSTER_UNREACHABLE,
            format!("{member} is not heard: {why}"),
        );
    }
    match mine {
        // What is said of it is of what home wanted before.
        Some(mine)
            if !deleted
                && mine.state.truth == Truth::True
                && Some(mine.observed_generation) != tenant.metadata.generation =>
        {
            let message = format!("waiting until {member} has taken the change in");
            said(Some(State::new(Truth::Unknown, reason::ORDERED, message)))
        }
        Some(mine) => said(Some(mine.state.clone())),
        None if deleted => {
            let message = format!("waiting until {member} has removed its Tenant");
            said(Some(State::new(Truth::False, reason::DELETING, message)))
        }
        // After a start, what the member has said last stands until it speaks.
        None => {
            let last = recorded(tenant).filter(|last| !is_homes_word(&last.reason));
            said(Some(last.unwrap_or_else(|| waits(member))))
        }
    }
}

/// Why the member is not to have the Tenant.
fn refused(tenant: &Tenant, member: &str, targets: &Targets) -> Option<State> {
    let refused = |why: &str, message: String| Some(State::new(Truth::False, why, message));
    let Some(target) = targets.get(member) else {
        let message = format!("there is no EdgeCluster {member}: it is placed when there is one");
        return refused(reason::CLUSTER_NOT_FOUND, message);
    };
    let source = target.source_namespace.as_deref();
    let named = tenant.names_member() == Some(member);
    if named && !tenant.is_for(member, source) {
        let message = format!(
            "EdgeCluster {member} is of namespace {}, and clusterRef names another secretNamespace",
            source.unwrap_or_default()
        );
        return refused(reason::CLUSTER_NOT_FOUND, message);
    }
    let namespace = tenant.metadata.namespace.as_deref().unwrap_or_default();
    target.allowed.refusal(member, namespace)
}

fn orphaned(tenant: &Tenant) -> bool {
    let annotation = tenant.annotations().get(ORPHAN_ANNOTATION);
    annotation.is_some_and(|value| value == "true")
}

fn recorded(tenant: &Tenant) -> Option<State> {
    conditions::find(&tenant.status.as_ref()?.conditions, conditions::PLACED)
}

/// Said at home, and no word of a member.
fn is_homes_word(why: &str) -> bool {
    [
        reason::CLUSTER_NOT_FOUND,
        reason::CLUSTER_REF_CHANGED,
        reason::CLUSTER_UNREACHABLE,
        reason::MEMBER_LEFT,
        reason::NAMESPACE_NOT_ALLOWED,
        reason::NOT_PLACING,
        reason::TOO_MANY,
    ]
    .contains(&why)
}

fn waits(member: &str) -> State {
    let message = format!("waiting until {member} has made the Tenant");
    State::new(Truth::Unknown, reason::ORDERED, message)
}

fn said(placed: Option<State>) -> Verdict {
    Verdict {
        step: Step::Nothing,
        placed,
    }
}

#[cfg(test)]
mod tests;
