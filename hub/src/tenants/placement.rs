//! Places home's Tenants on the member that they name. Decides the order for the member, the change to the
//! Tenant at home, and the condition `Placed`. Pure.

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantPlacement, TenantStatus};
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

/// Inputs of a decision, in addition to the Tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    /// Whether the hub places Tenants.
    pub(super) place: bool,
    /// Whether home's CRD retains `status.placement`.
    pub(super) records: bool,
    /// `None` until the EdgeClusters are known.
    pub(super) targets: Option<&'a Targets>,
    /// Why the member is silent. `None` if it reports, or is not late yet.
    pub(super) silent: Option<&'a str>,
    /// The member's latest report on the order.
    pub(super) said: Option<&'a PlacedReport>,
    /// Whether the member has no room for the order.
    pub(super) left_out: bool,
    /// For a deleted Tenant: the result of the latest read of the CRD.
    pub(super) deletion: Deletion,
}

/// Why home deletes a Tenant. Deleting the CRD deletes all Tenants, which does not request the removal of
/// any of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Deletion {
    #[default]
    NotKnown,
    /// A user deleted this Tenant. The CRD was not being deleted.
    Its,
    /// The CRD is being deleted. Home is a member, and its reconciler backs up the Tenants and recreates
    /// them.
    OfTheCrd,
    /// The CRD is being deleted. Home is not a member, so the Tenants are not recreated.
    OfTheCrdForGood,
}

/// The change to the Tenant at home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// Add the finalizer and the annotation with this member. The hub orders nothing before this.
    Begin(String),
    /// Remove the finalizer. `orphaned` describes the objects that remain, and where.
    End {
        orphaned: Option<String>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) step: Step,
    /// The condition. `None` removes it.
    pub(super) placed: Option<State>,
    /// The placement to record in the status. It stays there for the lifetime of the Tenant.
    pub(super) place: Option<TenantPlacement>,
}

/// Why the hub cannot send an order for a placed Tenant.
#[derive(Debug)]
enum Away<'a> {
    /// No EdgeCluster has the name, and no member is the recorded cluster.
    Left,
    /// The hub has not reached the member of that name yet.
    Unreached,
    /// The member of that name is a different cluster, with this UID.
    Another(&'a str),
}

/// Returns the order for a Tenant, and its member. The Tenant must have been read with its finalizer, so a
/// later deletion waits for the member.
pub(super) fn order(
    tenant: &Tenant,
    targets: &Targets,
    deletion: Deletion,
) -> Option<(String, PlacedTenant)> {
    let on = placed_on(tenant).filter(|_| is_held(tenant))?;
    let member = acting(tenant, on, targets).ok()?;
    let remove = tenant.metadata.deletion_timestamp.is_some();
    // The member keeps an orphaned Tenant. It also keeps the Tenant unless a user deleted this very Tenant.
    if remove && (orphaned(tenant) || deletion != Deletion::Its) {
        return None;
    }
    // The hub removes a placed Tenant even if the member no longer allows it.
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

/// Returns the member on which the Tenant is or will be placed, by its current name.
pub(super) fn member<'a>(tenant: &'a Tenant, targets: Option<&'a Targets>) -> Option<&'a str> {
    let Some(on) = placed_on(tenant) else {
        return tenant.names_member().filter(|name| *name != SELF_CLUSTER);
    };
    let acting = targets.and_then(|targets| acting(tenant, on, targets).ok());
    Some(acting.unwrap_or(on))
}

/// Returns the member that receives orders for a Tenant placed `on` a member. This is the recorded cluster
/// under its current name. Without a record, only the name identifies it: an older hub placed the Tenant,
/// or home's CRD drops `status.placement`.
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
    // Home itself reconciles its own Tenant. If two members are the same cluster, only one acts.
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
    /// Why the member of this name is not the intended one.
    pub(super) another: Option<&'static str>,
}

/// Returns the only member that counts, or `None` for a Tenant that may be on all members.
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
                another: Some("another cluster has this name now"),
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

/// Returns why the member is silent, once a report is overdue.
pub(super) fn silent<'a>(heard: &'a Heard, member: &str) -> Option<&'a str> {
    let saying = heard.said.get(member)?;
    match &saying.hearing {
        Hearing::Silent(why) => Some(why),
        Hearing::NotYet if !saying.patient => Some("no report since the hub started"),
        Hearing::NotYet | Hearing::Full => None,
    }
}

/// Sets or removes the condition `Placed` in the status aggregated from the members' reports.
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
    // If no member reports the Tenant, this explains why.
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
            // The hub does not place this Tenant. A user may create it on the member.
            None => said(None),
        };
    };
    // The Tenant is about to be placed, or another client overwrote home's finalizer.
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

/// Returns the placement of a Tenant that an older hub placed without recording the cluster.
fn unrecorded(tenant: &Tenant, on: &str, view: &View<'_>) -> Option<TenantPlacement> {
    let target = view.targets?.get(on)?;
    (view.records && place(tenant).is_none()).then_some(())?;
    on_record(on, target)
}

fn on_record(member: &str, target: &Target) -> Option<TenantPlacement> {
    Some(TenantPlacement {
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
    // Record the cluster before the first order: the name may later belong to another cluster.
    let target = targets.get(member);
    let Some(place) = target.and_then(|target| on_record(member, target)) else {
        let why = view.silent.unwrap_or("it is reached for the first time");
        let message = format!("no report from {member}: {why}");
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
            "the hub runs without --place-tenants: the Tenant on {on} stays and is reconciled there"
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
                "clusterRef names {} now, and cannot be changed once the Tenant is placed: it stays on {member}; put clusterRef back, or delete the Tenant and create it again",
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
            "{member} has the maximum number or size of placed Tenants; an existing copy of this Tenant stays there"
        );
        return said(Some(State::new(Truth::False, reason::TOO_MANY, message)));
    }
    if let Some(why) = view.silent {
        let message = format!("no report from {member}: {why}");
        return unknown(tenant, reason::CLUSTER_UNREACHABLE, message);
    }
    said(Some(reported(tenant, member, mine)))
}

/// Returns why a deleted Tenant's placed objects remain on the member.
fn left_there(tenant: &Tenant, on: &str, view: &View<'_>) -> Option<String> {
    tenant.metadata.deletion_timestamp.as_ref()?;
    if orphaned(tenant) {
        return Some(format!(
            "released by annotation {ORPHAN_ANNOTATION}: the Tenant on {on} stays there with its release"
        ));
    }
    (view.deletion == Deletion::OfTheCrdForGood).then(|| {
        format!("the CRD of Tenants is being deleted on the home cluster; the Tenant on {on} stays")
    })
}

fn unknown(tenant: &Tenant, why: &str, mut message: String) -> Verdict {
    if tenant.metadata.deletion_timestamp.is_some() {
        message += &format!("; deletion waits, until then or annotation {ORPHAN_ANNOTATION}=true");
    }
    said(Some(State::new(Truth::Unknown, why, message)))
}

/// Returns the verdict if the hub cannot send orders to the Tenant's member.
fn not_there(tenant: &Tenant, on: &str, away: Away<'_>) -> Verdict {
    let (why, message) = match away {
        Away::Left => (
            reason::MEMBER_LEFT,
            format!("EdgeCluster {on} no longer exists; its Tenant stays there"),
        ),
        Away::Unreached => (
            reason::CLUSTER_UNREACHABLE,
            format!(
                "no report from {on}: it gets no order until the hub has reached it and verified that it is the recorded cluster"
            ),
        ),
        Away::Another(uid) => {
            let recorded = place(tenant).map_or("", |place| &place.cluster_uid);
            let mut message = format!(
                "EdgeCluster {on} is another cluster now (UID {uid}): the Tenant stays on the recorded cluster (UID {recorded}), and this one gets no order"
            );
            if tenant.metadata.deletion_timestamp.is_none() {
                message += &format!(
                    "; to have it here, annotate the Tenant with {ORPHAN_ANNOTATION}=true, delete it and create it again"
                );
            }
            (reason::IDENTITY_CHANGED, message)
        }
    };
    unknown(tenant, why, message)
}

/// Returns the state that the member reports for the Tenant, or the pending operation.
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
        // After a hub restart, the member's last report remains valid until the next one.
        None => {
            let last = recorded(tenant).filter(|last| !is_homes_word(&last.reason));
            last.unwrap_or_else(|| waits(member))
        }
    }
}

/// Returns why the member must not receive the Tenant.
fn refused(tenant: &Tenant, member: &str, targets: &Targets) -> Option<State> {
    let refused = |why: &str, message: String| Some(State::new(Truth::False, why, message));
    let Some(target) = targets.get(member) else {
        let message = format!("EdgeCluster {member} does not exist; create or join that member");
        return refused(reason::CLUSTER_NOT_FOUND, message);
    };
    let source = target.source_namespace.as_deref();
    let named = tenant.names_member() == Some(member);
    if named && !tenant.is_for(member, source) {
        let message = format!(
            "the source of EdgeCluster {member} is in namespace {}, and clusterRef names another secretNamespace",
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

/// Returns whether the hub sets this reason itself, and not from a member's report.
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
    let message = format!("waiting until {member} has created the Tenant");
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
