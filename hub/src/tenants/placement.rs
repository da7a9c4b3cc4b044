//! Places home's Tenants on the member that they name. Decides the order for the member, the change to the
//! Tenant at home, and the condition `Placed`. Pure.

use jiff::Timestamp;
use krypton_crds::tenant::{Tenant, TenantPlacement, TenantStatus};
use krypton_reconciler::plan::{PREVIOUS_UID_ANNOTATION, previous_uids};
use krypton_types::conditions::{self, Outlook, State, Truth, reason};
use krypton_types::names::{
    ADOPT_ANNOTATION, ORPHAN_ANNOTATION, PAUSED_ANNOTATION, RECONCILE_REQUESTED_ANNOTATION,
    SELF_CLUSTER,
};
use krypton_types::placed_tenant::{
    PlacedReport, PlacedSpec, PlacedTenant, has_placed_finalizer, placed_on, recorded_placement,
};
use kube::ResourceExt;

use crate::members::tenant_reports::{ReportState, ReportedView, Target, Targets};

/// Inputs of a decision, in addition to the Tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlacementInput<'a> {
    /// Whether the hub places Tenants.
    pub(super) enabled: bool,
    /// Whether home's CRD retains `status.placement`.
    pub(super) crd_keeps_record: bool,
    /// `None` until the EdgeClusters are known.
    pub(super) targets: Option<&'a Targets>,
    /// Why the member is silent. `None` if it reports, or is not late yet.
    pub(super) silence: Option<&'a str>,
    /// The member's latest report on the Tenant.
    pub(super) report: Option<&'a PlacedReport>,
    /// Whether the order exceeds the limits of the member.
    pub(super) exceeds_limit: bool,
    /// For a deleted Tenant: the result of the latest read of the CRD.
    pub(super) deletion: TenantDeletionCause,
}

/// Why a Tenant at home is deleted. Deleting the CRD deletes all Tenants, which does not request the removal of
/// any of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TenantDeletionCause {
    #[default]
    Unknown,
    /// A user deleted this Tenant. The CRD was not being deleted.
    User,
    /// The CRD is being deleted. Home is a member, and its reconciler backs up the Tenants and recreates
    /// them.
    Crd,
    /// The CRD is being deleted. Home is not a member, so the Tenants are not recreated.
    CrdWithoutRestore,
}

/// The change to the finalizer and the annotation of the Tenant at home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FinalizerChange {
    /// Place the Tenant on this member. The hub orders nothing before this.
    Add(String),
    /// `orphaned` describes the objects that remain, and where.
    Remove { orphaned: Option<String> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlacementDecision {
    pub(super) finalizer: Option<FinalizerChange>,
    /// The condition `Placed`. `None` removes it.
    pub(super) condition: Option<State>,
    /// The placement to record in the status. It stays there for the lifetime of the Tenant.
    pub(super) placement: Option<TenantPlacement>,
}

/// Why the hub cannot send an order for a placed Tenant.
#[derive(Debug)]
enum OrderBlocked<'a> {
    /// No EdgeCluster has the name, and no member is the recorded cluster.
    MemberLeft,
    /// The hub has not reached the member of that name yet.
    Unreached,
    /// The member of that name is a different cluster, with this UID.
    OtherCluster(&'a str),
}

/// Returns the order for a Tenant, and its member. The Tenant must have been read with its finalizer, so a
/// later deletion waits for the member.
pub(super) fn order(
    tenant: &Tenant,
    targets: &Targets,
    deletion_cause: TenantDeletionCause,
) -> Option<(String, PlacedTenant)> {
    let placed_member = placed_on(tenant).filter(|_| has_placed_finalizer(tenant))?;
    let member = order_target(tenant, placed_member, targets).ok()?;
    let remove = tenant.metadata.deletion_timestamp.is_some();
    // The member keeps an orphaned Tenant. It also keeps the Tenant unless a user deleted this very Tenant.
    if remove && (is_orphaned(tenant) || deletion_cause != TenantDeletionCause::User) {
        return None;
    }
    // The hub removes a placed Tenant even if the member no longer allows it.
    if !remove && refusal(tenant, member, targets).is_some() {
        return None;
    }
    let annotations = tenant.annotations();
    let annotation = |name: &str| annotations.get(name).map(String::as_str);
    let spec = PlacedSpec {
        workspace: tenant.spec.workspace.clone(),
        values: tenant.spec.values.clone(),
        service_account_name: tenant.spec.service_account_name.clone(),
    };
    let former_uids = previous_uids(annotation(PREVIOUS_UID_ANNOTATION));
    let order = PlacedTenant {
        namespace: tenant.namespace().unwrap_or_default(),
        name: tenant.name_any(),
        uid: tenant.uid().unwrap_or_default(),
        former_uids: former_uids.map(str::to_owned).collect(),
        generation: tenant.metadata.generation.unwrap_or_default(),
        spec: if remove { PlacedSpec::default() } else { spec },
        remove,
        adopt: annotation(ADOPT_ANNOTATION) == Some("true"),
        paused: annotation(PAUSED_ANNOTATION).is_some_and(|value| value != "false"),
        requested: annotation(RECONCILE_REQUESTED_ANNOTATION).map(str::to_owned),
    };
    Some((member.to_owned(), order))
}

/// Returns the member on which the Tenant is or will be placed, by its current name.
pub(super) fn current_member<'a>(
    tenant: &'a Tenant,
    targets: Option<&'a Targets>,
) -> Option<&'a str> {
    let Some(placed_member) = placed_on(tenant) else {
        return tenant
            .referenced_member()
            .filter(|name| *name != SELF_CLUSTER);
    };
    let target = targets.and_then(|targets| order_target(tenant, placed_member, targets).ok());
    Some(target.unwrap_or(placed_member))
}

/// Returns the member that receives the orders for a Tenant that was placed on `placed_member`. This is the
/// recorded cluster under its current name. Without a record, only the name identifies it: an older hub placed
/// the Tenant, or home's CRD drops `status.placement`.
fn order_target<'a>(
    tenant: &'a Tenant,
    placed_member: &'a str,
    targets: &'a Targets,
) -> Result<&'a str, OrderBlocked<'a>> {
    let of_that_name = targets.get(placed_member);
    let Some(placement) = recorded_placement(tenant) else {
        return of_that_name
            .map(|_| placed_member)
            .ok_or(OrderBlocked::MemberLeft);
    };
    let is_recorded =
        |target: &&Target| target.cluster_uid.as_ref() == Some(&placement.cluster_uid);
    let same_name = of_that_name.filter(is_recorded);
    if same_name.is_some_and(|target| !target.duplicate) {
        return Ok(placed_member);
    }
    // Home itself reconciles its own Tenant. If two members are the same cluster, only one acts.
    let mut others = targets.iter().filter(|(name, _)| *name != SELF_CLUSTER);
    let may_act =
        |target: &Target| is_recorded(&target) && (same_name.is_none() || !target.duplicate);
    if let Some((name, _)) = others.find(|(_, target)| may_act(target)) {
        return Ok(name);
    }
    if same_name.is_some() {
        return Ok(placed_member);
    }
    Err(
        match of_that_name.map(|target| target.cluster_uid.as_deref()) {
            None => OrderBlocked::MemberLeft,
            Some(None) => OrderBlocked::Unreached,
            Some(Some(uid)) => OrderBlocked::OtherCluster(uid),
        },
    )
}

/// The one member that counts for the status of a Tenant that names it or is placed on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OnlyMember<'a> {
    /// Empty if the Tenant names no member.
    pub(super) name: &'a str,
    /// Why the member of this name is not the intended one.
    pub(super) mismatch: Option<&'static str>,
}

/// Returns the only member that counts, or `None` for a Tenant that may be on all members.
pub(super) fn only_member<'a>(
    tenant: &'a Tenant,
    targets: Option<&'a Targets>,
) -> Option<OnlyMember<'a>> {
    let matching = |name| OnlyMember {
        name,
        mismatch: None,
    };
    if let Some(placed_member) = placed_on(tenant) {
        let target = targets.map(|targets| order_target(tenant, placed_member, targets));
        return Some(match target {
            Some(Ok(member)) => matching(member),
            Some(Err(OrderBlocked::OtherCluster(_))) => OnlyMember {
                name: placed_member,
                mismatch: Some("another cluster has this name now"),
            },
            Some(Err(OrderBlocked::MemberLeft | OrderBlocked::Unreached)) | None => {
                matching(placed_member)
            }
        });
    }
    let named = tenant.referenced_member()?;
    let target = targets.and_then(|targets| targets.get(named));
    let source = target.and_then(|target| target.source_namespace.as_deref());
    Some(match tenant.is_for(named, source) {
        true => matching(named),
        false => OnlyMember {
            name: named,
            mismatch: Some("clusterRef names another secretNamespace"),
        },
    })
}

/// Returns why the member is silent, once a report is overdue.
pub(super) fn silence<'a>(view: &'a ReportedView, member: &str) -> Option<&'a str> {
    let member = view.members.get(member)?;
    match &member.report_state {
        ReportState::Silent(reason) => Some(reason),
        ReportState::Pending if !member.in_grace => Some("no report since the hub started"),
        ReportState::Pending | ReportState::Complete => None,
    }
}

/// Completes the status aggregated from the members' reports: sets or removes the condition `Placed`, and with it
/// `Reconciling` and `Stalled`. `outlook` is that of the reports.
pub(super) fn set_conditions(
    status: &mut TenantStatus,
    placed: Option<&State>,
    mut outlook: Option<Outlook>,
    generation: i64,
    now: Timestamp,
) {
    let list = &mut status.conditions;
    let mut ready = conditions::find(list, conditions::READY);
    match placed {
        None => {
            conditions::remove(list, conditions::PLACED);
        }
        Some(placed) => {
            conditions::set(list, conditions::PLACED, placed, generation, now);
            // If no member reports the Tenant, this explains why.
            if let Some(ready) = ready.as_mut().filter(|it| it.reason == reason::NO_CLUSTERS) {
                ready.message.clone_from(&placed.message);
                conditions::set(list, conditions::READY, ready, generation, now);
                outlook = Some(Outlook::from_reason(&placed.reason));
                status.last_message = Some(placed.message.clone());
            }
        }
    }
    if let (Some(ready), Some(outlook)) = (ready, outlook) {
        conditions::set_progress(list, &ready, outlook, generation, now);
    }
}

pub(super) fn decide(tenant: &Tenant, input: &PlacementInput<'_>) -> PlacementDecision {
    let Some(placed_member) = placed_on(tenant) else {
        return match current_member(tenant, input.targets).filter(|_| input.enabled) {
            Some(member) => decide_unplaced(tenant, member, input),
            // The hub does not place this Tenant. A user may create it on the member.
            None => only_condition(None),
        };
    };
    // The Tenant is about to be placed, or another client overwrote home's finalizer.
    if input.enabled && !has_placed_finalizer(tenant) {
        return PlacementDecision {
            finalizer: Some(FinalizerChange::Add(placed_member.to_owned())),
            ..only_condition(Some(waiting_for(placed_member)))
        };
    }
    PlacementDecision {
        placement: missing_record(tenant, placed_member, input),
        ..decide_placed(tenant, placed_member, input)
    }
}

/// Returns the placement of a Tenant that an older hub placed without recording the cluster.
fn missing_record(
    tenant: &Tenant,
    placed_member: &str,
    input: &PlacementInput<'_>,
) -> Option<TenantPlacement> {
    let target = input.targets?.get(placed_member)?;
    (input.crd_keeps_record && recorded_placement(tenant).is_none()).then_some(())?;
    placement_record(placed_member, target)
}

fn placement_record(member: &str, target: &Target) -> Option<TenantPlacement> {
    Some(TenantPlacement {
        cluster: member.to_owned(),
        cluster_uid: target.cluster_uid.clone()?,
    })
}

fn decide_unplaced(tenant: &Tenant, member: &str, input: &PlacementInput<'_>) -> PlacementDecision {
    let deleted = tenant.metadata.deletion_timestamp.is_some();
    let Some(targets) = input.targets.filter(|_| !deleted) else {
        return only_condition(recorded_condition(tenant));
    };
    if let Some(refusal) = refusal(tenant, member, targets) {
        return only_condition(Some(refusal));
    }
    // Record the cluster before the first order: the name may later belong to another cluster.
    let target = targets.get(member);
    let Some(placement) = target.and_then(|target| placement_record(member, target)) else {
        let silence = input.silence.unwrap_or("waiting for the first connection");
        let message = format!("no report from {member}: {silence}");
        let unreachable = State::new(Truth::Unknown, reason::CLUSTER_UNREACHABLE, message);
        return only_condition(Some(unreachable));
    };
    let waiting = only_condition(Some(waiting_for(member)));
    if input.crd_keeps_record {
        return PlacementDecision {
            placement: Some(placement),
            ..waiting
        };
    }
    PlacementDecision {
        finalizer: Some(FinalizerChange::Add(member.to_owned())),
        ..waiting
    }
}

fn decide_placed(
    tenant: &Tenant,
    placed_member: &str,
    input: &PlacementInput<'_>,
) -> PlacementDecision {
    let deleted = tenant.metadata.deletion_timestamp.is_some();
    if let Some(message) = orphan_message(tenant, placed_member, input) {
        return PlacementDecision {
            finalizer: Some(FinalizerChange::Remove {
                orphaned: Some(message.clone()),
            }),
            ..only_condition(Some(State::new(Truth::False, reason::DELETING, message)))
        };
    }
    if !input.enabled {
        let message = format!(
            "the hub runs without --place-tenants: the Tenant on {placed_member} stays and is reconciled there"
        );
        return unknown_condition(tenant, reason::NOT_PLACING, message);
    }
    let Some(targets) = input.targets else {
        return only_condition(recorded_condition(tenant));
    };
    let member = match order_target(tenant, placed_member, targets) {
        Ok(member) => member,
        Err(blocked) => return blocked_decision(tenant, placed_member, blocked),
    };
    let report = input
        .report
        .filter(|report| Some(report.uid.as_str()) == tenant.metadata.uid.as_deref());
    if deleted
        && input.deletion == TenantDeletionCause::User
        && report.is_some_and(|report| report.gone)
    {
        let state = report.map(|report| report.state.clone());
        let foreign = state
            .as_ref()
            .filter(|state| state.reason == reason::BELONGS_TO_ANOTHER);
        return PlacementDecision {
            finalizer: Some(FinalizerChange::Remove {
                orphaned: foreign.map(|state| format!("{member}: {}", state.message)),
            }),
            ..only_condition(state)
        };
    }
    if !deleted {
        if ![Some(placed_member), Some(member)].contains(&tenant.referenced_member()) {
            let message = format!(
                "clusterRef names {} now, but the Tenant is placed on {member} and stays there; restore clusterRef, or delete the Tenant and create it again",
                tenant.referenced_member().unwrap_or("no member")
            );
            let changed = State::new(Truth::False, reason::CLUSTER_REF_CHANGED, message);
            return only_condition(Some(changed));
        }
        if let Some(refusal) = refusal(tenant, member, targets) {
            return only_condition(Some(refusal));
        }
    }
    if input.exceeds_limit {
        let message = format!(
            "{member} has the maximum number or size of placed Tenants; delete some of them. An existing copy of this Tenant stays there"
        );
        return only_condition(Some(State::new(Truth::False, reason::TOO_MANY, message)));
    }
    if let Some(silence) = input.silence {
        let message = format!("no report from {member}: {silence}");
        return unknown_condition(tenant, reason::CLUSTER_UNREACHABLE, message);
    }
    only_condition(Some(reported_condition(tenant, member, report)))
}

/// Returns why a deleted Tenant's placed objects remain on the member.
fn orphan_message(
    tenant: &Tenant,
    placed_member: &str,
    input: &PlacementInput<'_>,
) -> Option<String> {
    tenant.metadata.deletion_timestamp.as_ref()?;
    if is_orphaned(tenant) {
        return Some(format!(
            "released by annotation {ORPHAN_ANNOTATION}: the Tenant on {placed_member} stays there with its release"
        ));
    }
    (input.deletion == TenantDeletionCause::CrdWithoutRestore).then(|| {
        format!("the CRD of Tenants is being deleted on the home cluster; the Tenant on {placed_member} stays")
    })
}

fn unknown_condition(tenant: &Tenant, reason: &str, mut message: String) -> PlacementDecision {
    if tenant.metadata.deletion_timestamp.is_some() {
        message += &format!("; deletion waits; to stop waiting, set {ORPHAN_ANNOTATION}=true");
    }
    only_condition(Some(State::new(Truth::Unknown, reason, message)))
}

/// Returns the decision if the hub cannot send orders to the Tenant's member.
fn blocked_decision(
    tenant: &Tenant,
    placed_member: &str,
    blocked: OrderBlocked<'_>,
) -> PlacementDecision {
    let (reason, message) = match blocked {
        OrderBlocked::MemberLeft => (
            reason::MEMBER_LEFT,
            format!("EdgeCluster {placed_member} no longer exists; its Tenant stays there"),
        ),
        OrderBlocked::Unreached => (
            reason::CLUSTER_UNREACHABLE,
            format!(
                "no report from {placed_member}: the hub has not verified yet that it is the recorded cluster"
            ),
        ),
        OrderBlocked::OtherCluster(uid) => {
            let recorded_uid =
                recorded_placement(tenant).map_or("", |placement| &placement.cluster_uid);
            let mut message = format!(
                "EdgeCluster {placed_member} represents another cluster now (UID {uid}); the Tenant stays on the recorded cluster (UID {recorded_uid})"
            );
            if tenant.metadata.deletion_timestamp.is_none() {
                message += &format!(
                    "; to place it on the new cluster, annotate the Tenant with {ORPHAN_ANNOTATION}=true, delete it and create it again"
                );
            }
            (reason::IDENTITY_CHANGED, message)
        }
    };
    unknown_condition(tenant, reason, message)
}

/// Returns the state that the member reports for the Tenant, or the pending operation.
fn reported_condition(tenant: &Tenant, member: &str, report: Option<&PlacedReport>) -> State {
    let deleted = tenant.metadata.deletion_timestamp.is_some();
    match report {
        // The report is about an earlier generation.
        Some(report)
            if !deleted
                && report.state.truth == Truth::True
                && Some(report.observed_generation) != tenant.metadata.generation =>
        {
            let message = format!("waiting until {member} has applied the change");
            State::new(Truth::Unknown, reason::ORDERED, message)
        }
        Some(report) => report.state.clone(),
        None if deleted => {
            let message = format!("waiting until {member} has removed its Tenant");
            State::new(Truth::False, reason::DELETING, message)
        }
        // After a hub restart, the member's last report remains valid until the next one.
        None => {
            let last = recorded_condition(tenant).filter(|last| !is_set_by_hub(&last.reason));
            last.unwrap_or_else(|| waiting_for(member))
        }
    }
}

/// Returns why the member must not receive the Tenant.
fn refusal(tenant: &Tenant, member: &str, targets: &Targets) -> Option<State> {
    let refused = |reason: &str, message: String| Some(State::new(Truth::False, reason, message));
    let Some(target) = targets.get(member) else {
        let message = format!("EdgeCluster {member} does not exist; create or join that member");
        return refused(reason::CLUSTER_NOT_FOUND, message);
    };
    let source = target.source_namespace.as_deref();
    let named = tenant.referenced_member() == Some(member);
    if named && !tenant.is_for(member, source) {
        let message = format!(
            "the source of EdgeCluster {member} is in namespace {0}; set spec.clusterRef.secretNamespace to {0}",
            source.unwrap_or_default()
        );
        return refused(reason::CLUSTER_NOT_FOUND, message);
    }
    let namespace = tenant.metadata.namespace.as_deref().unwrap_or_default();
    target.allowed.refusal(member, namespace)
}

fn is_orphaned(tenant: &Tenant) -> bool {
    let annotation = tenant.annotations().get(ORPHAN_ANNOTATION);
    annotation.is_some_and(|value| value == "true")
}

fn recorded_condition(tenant: &Tenant) -> Option<State> {
    conditions::find(&tenant.status.as_ref()?.conditions, conditions::PLACED)
}

/// Returns whether the hub sets this reason itself, and not from a member's report.
fn is_set_by_hub(reason: &str) -> bool {
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
    .contains(&reason)
}

fn waiting_for(member: &str) -> State {
    let message = format!("waiting until {member} has created the Tenant");
    State::new(Truth::Unknown, reason::ORDERED, message)
}

fn only_condition(condition: Option<State>) -> PlacementDecision {
    PlacementDecision {
        finalizer: None,
        condition,
        placement: None,
    }
}

#[cfg(test)]
mod tests;
