//! Tenants of home that name another member: what is ordered of that member, what is done to the Tenant at
//! home, and the condition `Placed`. Pure.

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantPlace, TenantStatus};
use krypton_reconciler::plan::PREVIOUS_UID_ANNOTATION;
use krypton_types::conditions::{self, State, Truth, reason};
use krypton_types::names::{
    ADOPT_ANNOTATION, ORPHAN_ANNOTATION, PAUSED_ANNOTATION, RECONCILE_REQUESTED_ANNOTATION,
    SELF_CLUSTER,
};
use krypton_types::placed_tenant::{
    PlacedReport, PlacedSpec, PlacedTenant, is_held, place, placed_on,
};
use kube::ResourceExt;

use crate::members::tenant_reports::{Heard, Hearing, Target, Targets};

/// What a decision rests on, beside the Tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    /// The hub places Tenants.
    pub(super) place: bool,
    /// Home's CRD keeps what the status says of the place.
    pub(super) records: bool,
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

/// Why a Tenant of home goes. With its CRD go all, and nobody has wanted that of any of them.
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
    /// It gets the finalizer, and the name of this member beside it: only then an order is given.
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
    /// To be put on record. It stays there as long as the Tenant does.
    pub(super) place: Option<TenantPlace>,
}

/// Why what is placed cannot be asked for.
#[derive(Debug)]
enum Away<'a> {
    /// No member has that name, and none is that cluster.
    Left,
    /// The member of that name has not been reached yet.
    Unreached,
    /// The member of that name is this other cluster.
    Another(&'a str),
}

/// What is ordered, and of which member. Computed from a Tenant that was read with its finalizer: whoever
/// deletes it from then on waits for the member.
pub(super) fn order(
    tenant: &Tenant,
    targets: &Targets,
    deletion: Deletion,
) -> Option<(String, PlacedTenant)> {
    let on = placed_on(tenant).filter(|_| is_held(tenant))?;
    let member = acting(tenant, on, targets).ok()?;
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
        service_account_name: tenant.spec.service_account_name.clone(),
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

/// The member that the Tenant is placed on, by the name that it has now, or is to be.
pub(super) fn member<'a>(tenant: &'a Tenant, targets: Option<&'a Targets>) -> Option<&'a str> {
    let Some(on) = placed_on(tenant) else {
        return tenant.names_member().filter(|name| *name != SELF_CLUSTER);
    };
    let acting = targets.and_then(|targets| acting(tenant, on, targets).ok());
    Some(acting.unwrap_or(on))
}

/// Who is asked for what is placed `on` that member: the cluster on record, by whatever name it has now.
/// Where none is on record, because an older hub has placed it or home's CRD does not keep it, the name is
/// all that there is.
fn acting<'a>(tenant: &'a Tenant, on: &'a str, targets: &'a Targets) -> Result<&'a str, Away<'a>> {
    let here = targets.get(on);
    let Some(place) = place(tenant) else {
        return here.map(|_| on).ok_or(Away::Left);
    };
    let is = |target: &&Target| target.cluster_uid.as_ref() == Some(&place.cluster_uid);
    let here_is = here.filter(is);
    if here_is.is_some_and(|target| !target.duplicate) {
        return Ok(on);
    }
    // On home itself the Tenant is the one of home. Of two members that are the cluster, one acts.
    let mut others = targets.iter().filter(|(name, _)| *name != SELF_CLUSTER);
    let acts = |target: &Target| is(&target) && (here_is.is_none() || !target.duplicate);
    if let Some((name, _)) = others.find(|(_, target)| acts(target)) {
        return Ok(name);
    }
    if here_is.is_some() {
        return Ok(on);
    }
    Err(match here.map(|target| target.cluster_uid.as_deref()) {
        None => Away::Left,
        Some(None) => Away::Unreached,
        Some(Some(uid)) => Away::Another(uid),
    })
}

/// The one member that counts for the status of a Tenant that names it or is placed on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sole<'a> {
    /// Empty if the Tenant names no member.
    pub(super) name: &'a str,
    /// Why the member that has this name is another.
    pub(super) another: Option<&'static str>,
}

/// `None` for a Tenant that may be on all members.
pub(super) fn sole<'a>(tenant: &'a Tenant, targets: Option<&'a Targets>) -> Option<Sole<'a>> {
    let is = |name| Sole {
        name,
        another: None,
    };
    if let Some(on) = placed_on(tenant) {
        let acting = targets.map(|targets| acting(tenant, on, targets));
        return Some(match acting {
            Some(Ok(member)) => is(member),
            Some(Err(Away::Another(_))) => Sole {
                name: on,
                another: Some("another cluster has this name by now"),
            },
            Some(Err(Away::Left | Away::Unreached)) | None => is(on),
        });
    }
    let named = tenant.names_member()?;
    let target = targets.and_then(|targets| targets.get(named));
    let source = target.and_then(|target| target.source_namespace.as_deref());
    Some(match tenant.is_for(named, source) {
        true => is(named),
        false => Sole {
            name: named,
            another: Some("clusterRef names another secretNamespace"),
        },
    })
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
    let Some(on) = placed_on(tenant) else {
        return match member(tenant, view.targets).filter(|_| view.place) {
            Some(member) => to_be_placed(tenant, member, view),
            // As ever: somebody makes it on the member, or nobody does.
            None => said(None),
        };
    };
    // It is about to be placed, or somebody has written it anew without what home had put there.
    if view.place && !is_held(tenant) {
        return Verdict {
            step: Step::Begin(on.to_owned()),
            ..said(Some(waits(on)))
        };
    }
    Verdict {
        place: unrecorded(tenant, on, view),
        ..placed(tenant, on, view)
    }
}

/// What an older hub has placed, and could not put on record.
fn unrecorded(tenant: &Tenant, on: &str, view: &View<'_>) -> Option<TenantPlace> {
    let target = view.targets?.get(on)?;
    (view.records && place(tenant).is_none()).then_some(())?;
    on_record(on, target)
}

fn on_record(member: &str, target: &Target) -> Option<TenantPlace> {
    Some(TenantPlace {
        cluster: member.to_owned(),
        cluster_uid: target.cluster_uid.clone()?,
    })
}

fn to_be_placed(tenant: &Tenant, member: &str, view: &View<'_>) -> Verdict {
    let Some(targets) = view.targets else {
        return said(recorded(tenant));
    };
    if tenant.metadata.deletion_timestamp.is_some() {
        return said(recorded(tenant));
    }
    if let Some(refused) = refused(tenant, member, targets) {
        return said(Some(refused));
    }
    // Which cluster it is, is on record before anything is ordered of it: the name may be another's one day.
    let target = targets.get(member);
    let Some(place) = target.and_then(|target| on_record(member, target)) else {
        let why = view.silent.unwrap_or("it is reached for the first time");
        let message = format!("{member} is not heard: {why}");
        let away = State::new(Truth::Unknown, reason::CLUSTER_UNREACHABLE, message);
        return said(Some(away));
    };
    let waits = said(Some(waits(member)));
    if view.records {
        return Verdict {
            place: Some(place),
            ..waits
        };
    }
    Verdict {
        step: Step::Begin(member.to_owned()),
        ..waits
    }
}

fn placed(tenant: &Tenant, on: &str, view: &View<'_>) -> Verdict {
    let deleted = tenant.metadata.deletion_timestamp.is_some();
    if let Some(message) = left_there(tenant, on, view) {
        return Verdict {
            step: Step::End {
                orphaned: Some(message.clone()),
            },
            ..said(Some(State::new(Truth::False, reason::DELETING, message)))
        };
    }
    if !view.place {
        let message = format!(
            "the hub runs without --place-tenants: what was placed on {on} stays as it is, and is looked after there"
        );
        return unknown(tenant, reason::NOT_PLACING, message);
    }
    let Some(targets) = view.targets else {
        return said(recorded(tenant));
    };
    let member = match acting(tenant, on, targets) {
        Ok(member) => member,
        Err(away) => return not_there(tenant, on, away),
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
            ..said(state)
        };
    }
    if !deleted {
        if ![Some(on), Some(member)].contains(&tenant.names_member()) {
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
        let message = format!("{member} is not heard: {why}");
        return unknown(tenant, reason::CLUSTER_UNREACHABLE, message);
    }
    said(Some(reported(tenant, member, mine)))
}

/// Why a deleted Tenant leaves on its member what was placed there.
fn left_there(tenant: &Tenant, on: &str, view: &View<'_>) -> Option<String> {
    tenant.metadata.deletion_timestamp.as_ref()?;
    if orphaned(tenant) {
        return Some(format!(
            "let go by annotation {ORPHAN_ANNOTATION}: what was placed on {on} stays there, with its release"
        ));
    }
    (view.deletion == Deletion::OfTheCrdForGood).then(|| {
        format!("the CRD of Tenants is being deleted at home: what was placed on {on} stays there")
    })
}

fn unknown(tenant: &Tenant, why: &str, mut message: String) -> Verdict {
    if tenant.metadata.deletion_timestamp.is_some() {
        message += &format!("; deletion waits, until then or annotation {ORPHAN_ANNOTATION}=true");
    }
    said(Some(State::new(Truth::Unknown, why, message)))
}

/// The member that the Tenant is placed on cannot be ordered anything.
fn not_there(tenant: &Tenant, on: &str, away: Away<'_>) -> Verdict {
    let (why, message) = match away {
        Away::Left => (
            reason::MEMBER_LEFT,
            format!(
                "there is no EdgeCluster {on} any more; what was placed there stays, until it is back"
            ),
        ),
        Away::Unreached => (
            reason::CLUSTER_UNREACHABLE,
            format!(
                "{on} is not heard: nothing is ordered of it before it has been reached, and is known to be the cluster that this is placed on"
            ),
        ),
        Away::Another(uid) => {
            let recorded = place(tenant).map_or("", |place| &place.cluster_uid);
            let mut message = format!(
                "EdgeCluster {on} is another cluster by now, with the UID {uid}: what was placed on the one with the UID {recorded} stays there, and nothing is ordered of this one"
            );
            if tenant.metadata.deletion_timestamp.is_none() {
                message += &format!(
                    "; to have it here, annotate the Tenant with {ORPHAN_ANNOTATION}=true, delete it and create it anew"
                );
            }
            (reason::IDENTITY_CHANGED, message)
        }
    };
    unknown(tenant, why, message)
}

/// What the member reports of the Tenant, or what is waited for.
fn reported(tenant: &Tenant, member: &str, mine: Option<&PlacedReport>) -> State {
    let deleted = tenant.metadata.deletion_timestamp.is_some();
    match mine {
        // The report is about an earlier generation.
        Some(mine)
            if !deleted
                && mine.state.truth == Truth::True
                && Some(mine.observed_generation) != tenant.metadata.generation =>
        {
            let message = format!("waiting until {member} has taken the change in");
            State::new(Truth::Unknown, reason::ORDERED, message)
        }
        Some(mine) => mine.state.clone(),
        None if deleted => {
            let message = format!("waiting until {member} has removed its Tenant");
            State::new(Truth::False, reason::DELETING, message)
        }
        // After a start, the member's last report stands until the next one.
        None => {
            let last = recorded(tenant).filter(|last| !is_homes_word(&last.reason));
            last.unwrap_or_else(|| waits(member))
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
        reason::IDENTITY_CHANGED,
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
        place: None,
    }
}

#[cfg(test)]
mod tests;
