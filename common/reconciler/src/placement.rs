//! Placement of a Tenant of the home cluster on a member: decides the next step and the state to report for one order.
//!
//! The decision has no I/O.

use krypton_crds::tenant::{Tenant, TenantSpec};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::names::{
    HOME_UID_ANNOTATION, MANAGED_BY_HUB, MANAGED_BY_LABEL, PAUSED_ANNOTATION,
    RECONCILE_REQUESTED_ANNOTATION,
};
use krypton_types::placed_tenant::PlacedTenant;
use kube::ResourceExt;

/// Input of the decision in addition to the order.
#[derive(Clone, Copy, Debug)]
pub struct PlacementView<'a> {
    /// The Tenant with the namespace and name of the order.
    pub tenant: Option<&'a Tenant>,
    /// Whether the namespace is being deleted. `None` if it does not exist.
    pub namespace_terminating: Option<bool>,
    /// Reason and message if nothing may be written.
    pub hold: Option<(&'static str, &'a str)>,
}

/// The next step of the placement.
#[derive(Clone, Debug, PartialEq)]
pub enum PlacementStep {
    /// Nothing to do.
    Settled(State),
    CreateNamespace,
    Create(Box<Tenant>),
    /// Replace the Tenant. Its resourceVersion is the precondition.
    Update(Box<Tenant>),
    /// Delete the Tenant with this UID.
    Delete(String),
    /// The view shows that the removal is complete. The hub forgets the Tenant after this report, so a read from the
    /// API server must confirm it first.
    Confirm(State),
}

/// Returns true if a read from the API server confirms that the removal is complete.
pub fn is_removal_confirmed(order: &PlacedTenant, tenant: Option<&Tenant>) -> bool {
    let uid = tenant.and_then(home_uid);
    !uid.is_some_and(|uid| order.is_for(uid))
}

pub fn decide(order: &PlacedTenant, view: &PlacementView<'_>) -> PlacementStep {
    let step = match view.tenant {
        None => decide_absent(order, view),
        Some(tenant) => decide_present(order, tenant),
    };
    match (view.hold, step) {
        (_, PlacementStep::Settled(state)) => PlacementStep::Settled(state),
        (Some((reason, message)), _) => {
            PlacementStep::Settled(State::new(Truth::Unknown, reason, message))
        }
        (None, step) => step,
    }
}

fn decide_absent(order: &PlacedTenant, view: &PlacementView<'_>) -> PlacementStep {
    if order.remove {
        let message = "deleted the Tenant on this cluster, as the home cluster requested";
        return PlacementStep::Confirm(not_placed(reason::TENANT_GONE, message));
    }
    if order.paused {
        return PlacementStep::Settled(not_placed(
            reason::PAUSED,
            "not created while it is paused on the home cluster",
        ));
    }
    match view.namespace_terminating {
        None => PlacementStep::CreateNamespace,
        Some(true) => {
            let message = format!(
                "namespace {} is being deleted on this cluster; waiting until it is gone",
                order.namespace
            );
            PlacementStep::Settled(not_placed(reason::NAMESPACE_TERMINATING, &message))
        }
        Some(false) => {
            let mut tenant = Tenant::new(&order.name, TenantSpec::default());
            tenant.metadata.namespace = Some(order.namespace.clone());
            PlacementStep::Create(Box::new(as_ordered(order, tenant)))
        }
    }
}

fn decide_present(order: &PlacedTenant, tenant: &Tenant) -> PlacementStep {
    match home_uid(tenant) {
        None => return leave_foreign(order, reason::ALREADY_THERE, &foreign_tenant_message(order)),
        Some(uid) if order.is_for(uid) => {}
        Some(_) if order.adopt && !order.remove => {}
        Some(uid) => {
            let message = format!(
                "the home cluster placed Tenant {} on this cluster for another object, with UID {uid}; to adopt it, set annotation {}=true on the Tenant on the home cluster",
                order.key(),
                krypton_types::names::ADOPT_ANNOTATION
            );
            return leave_foreign(order, reason::BELONGS_TO_ANOTHER, &message);
        }
    }
    if order.remove {
        let mut updated = tenant.clone();
        set_pause(order, &mut updated);
        // While the Tenant is paused here, its deletion waits. The pause follows the home cluster until the end.
        if updated != *tenant {
            return update(updated);
        }
    }
    if tenant.metadata.deletion_timestamp.is_some() {
        let message = match order.remove {
            true => "deleting the Tenant on this cluster, as the home cluster requested",
            false => {
                "another client deletes the Tenant on this cluster; it is created again after the deletion"
            }
        };
        return PlacementStep::Settled(not_placed(reason::DELETING, message));
    }
    if order.remove {
        return match order.paused {
            true => PlacementStep::Settled(not_placed(
                reason::PAUSED,
                "deletion waits: paused by annotation on the home cluster",
            )),
            false => PlacementStep::Delete(tenant.uid().unwrap_or_default()),
        };
    }
    let desired = as_ordered(order, tenant.clone());
    if desired == *tenant {
        let message = format!(
            "Tenant {} on this cluster matches the home cluster",
            order.key()
        );
        return PlacementStep::Settled(State::new(Truth::True, reason::PLACED, message));
    }
    update(desired)
}

/// Updates the Tenant without its managed fields. The API server would replace its complete list with the request's.
fn update(mut tenant: Tenant) -> PlacementStep {
    tenant.metadata.managed_fields = None;
    PlacementStep::Update(Box::new(tenant))
}

/// A Tenant that the home cluster did not place stays unchanged. A removal order does not delete it.
fn leave_foreign(order: &PlacedTenant, reason: &str, message: &str) -> PlacementStep {
    match order.remove {
        true => PlacementStep::Confirm(not_placed(
            reason,
            &format!("{message}; it stays on this cluster"),
        )),
        false => PlacementStep::Settled(not_placed(reason, message)),
    }
}

fn foreign_tenant_message(order: &PlacedTenant) -> String {
    format!(
        "this cluster has a Tenant {} that the home cluster did not create; Krypton does not adopt it, but shows its conditions",
        order.key()
    )
}

/// Returns the UID on the home cluster that the Tenant was placed for. `None` if it was not placed.
pub(crate) fn home_uid(tenant: &Tenant) -> Option<&str> {
    let manager = tenant.labels().get(MANAGED_BY_LABEL)?;
    if manager != MANAGED_BY_HUB {
        return None;
    }
    let uid = tenant.annotations().get(HOME_UID_ANNOTATION)?;
    Some(uid.as_str())
}

/// Returns the Tenant as ordered. Fields that the order does not set stay unchanged.
fn as_ordered(order: &PlacedTenant, mut tenant: Tenant) -> Tenant {
    tenant
        .labels_mut()
        .insert(MANAGED_BY_LABEL.to_owned(), MANAGED_BY_HUB.to_owned());
    let annotations = tenant.annotations_mut();
    annotations.insert(HOME_UID_ANNOTATION.to_owned(), order.uid.clone());
    if let Some(requested) = &order.requested {
        let key = RECONCILE_REQUESTED_ANNOTATION.to_owned();
        annotations.insert(key, requested.clone());
    }
    set_pause(order, &mut tenant);
    tenant.spec = TenantSpec {
        workspace: order.spec.workspace.clone(),
        // The placed Tenant belongs to the cluster that contains it.
        cluster_ref: None,
        values: order.spec.values.clone(),
        service_account_name: order.spec.service_account_name.clone(),
    };
    tenant
}

/// Sets or removes the pause annotation, as ordered.
fn set_pause(order: &PlacedTenant, tenant: &mut Tenant) {
    let annotations = tenant.annotations_mut();
    match order.paused {
        true => annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned()),
        false => annotations.remove(PAUSED_ANNOTATION),
    };
}

fn not_placed(reason: &str, message: &str) -> State {
    State::new(Truth::False, reason, message)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use krypton_crds::tenant::ClusterRef;
    use krypton_types::placed_tenant::PlacedSpec;

    use super::*;

    fn order() -> PlacedTenant {
        PlacedTenant {
            namespace: "team".to_owned(),
            name: "acme".to_owned(),
            uid: "home-1".to_owned(),
            generation: 1,
            spec: PlacedSpec {
                workspace: Some("acme-ws".to_owned()),
                values: None,
                service_account_name: None,
            },
            ..PlacedTenant::default()
        }
    }

    fn order_with(change: impl FnOnce(&mut PlacedTenant)) -> PlacedTenant {
        let mut order = order();
        change(&mut order);
        order
    }

    fn removal() -> PlacedTenant {
        order_with(|order| order.remove = true)
    }

    /// The Tenant that this order creates, as the API server stores it.
    fn created_tenant(order: &PlacedTenant) -> Tenant {
        let PlacementStep::Create(tenant) = next_step(order, None) else {
            panic!("it is not made");
        };
        let mut tenant = *tenant;
        tenant.metadata.uid = Some("edge-1".to_owned());
        tenant.metadata.resource_version = Some("7".to_owned());
        tenant
    }

    fn view(tenant: Option<&Tenant>) -> PlacementView<'_> {
        PlacementView {
            tenant,
            namespace_terminating: Some(false),
            hold: None,
        }
    }

    fn next_step(order: &PlacedTenant, tenant: Option<&Tenant>) -> PlacementStep {
        decide(order, &view(tenant))
    }

    #[test]
    fn update_sends_no_managed_fields() {
        let mut tenant = created_tenant(&order());
        tenant.metadata.managed_fields = Some(Vec::new());
        let step = next_step(&order(), Some(&tenant));
        assert!(matches!(step, PlacementStep::Settled(_)), "{step:?}");
        let changed = order_with(|order| order.spec.workspace = Some("other".to_owned()));
        let paused_removal = order_with(|order| (order.remove, order.paused) = (true, true));
        for order in [changed, paused_removal] {
            let PlacementStep::Update(updated) = next_step(&order, Some(&tenant)) else {
                panic!("{order:?} updates nothing");
            };
            assert_eq!(updated.metadata.managed_fields, None);
        }
    }

    /// Returns the reason or the name of the step.
    fn reason_or_name(step: &PlacementStep) -> &str {
        match step {
            PlacementStep::Settled(state) => &state.reason,
            PlacementStep::CreateNamespace => "create-namespace",
            PlacementStep::Create(_) => "create",
            PlacementStep::Update(_) => "update",
            PlacementStep::Delete(_) => "delete",
            PlacementStep::Confirm(_) => "confirm",
        }
    }

    #[test]
    fn placement_order_and_found_tenant_determine_next_step() {
        let tenant_with = |change: fn(&mut Tenant)| {
            let mut tenant = created_tenant(&order());
            change(&mut tenant);
            Some(tenant)
        };
        let ours = tenant_with(|_| {});
        let unmanaged = tenant_with(|tenant| tenant.labels_mut().clear());
        let managed_by_other = tenant_with(|tenant| {
            let managers = tenant.labels_mut();
            managers.insert(MANAGED_BY_LABEL.to_owned(), "argo".to_owned());
        });
        let without_home_uid = tenant_with(|tenant| tenant.annotations_mut().clear());
        let for_other_uid = tenant_with(|tenant| {
            let annotations = tenant.annotations_mut();
            annotations.insert(HOME_UID_ANNOTATION.to_owned(), "home-0".to_owned());
        });
        let terminating = tenant_with(|tenant| {
            tenant.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        });
        let other_workspace = tenant_with(|tenant| tenant.spec.workspace = Some("mine".to_owned()));
        let with_cluster_ref = tenant_with(|tenant| {
            tenant.spec.cluster_ref = Some(ClusterRef {
                secret_name: Some("edge-9".to_owned()),
                secret_namespace: None,
            });
        });
        let paused = tenant_with(|tenant| {
            let annotations = tenant.annotations_mut();
            annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned());
        });
        let terminating_paused = paused.clone().map(|mut tenant| {
            tenant.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
            tenant
        });
        let annotated = tenant_with(|tenant| {
            let annotations = tenant.annotations_mut();
            annotations.insert("mine".to_owned(), "stays".to_owned());
        });
        let adoption = || order_with(|order| order.adopt = true);
        let restored = || order_with(|order| order.former_uids = vec!["home-0".to_owned()]);
        let removal_paused = || order_with(|order| (order.remove, order.paused) = (true, true));
        let table: &[(PlacedTenant, &Option<Tenant>, &str)] = &[
            (order(), &None, "create"),
            (order(), &ours, "Placed"),
            (order(), &annotated, "Placed"),
            (order(), &other_workspace, "update"),
            (order(), &with_cluster_ref, "update"),
            (order(), &paused, "update"),
            (order(), &terminating, "Deleting"),
            (order(), &unmanaged, "AlreadyThere"),
            (order(), &managed_by_other, "AlreadyThere"),
            (order(), &without_home_uid, "AlreadyThere"),
            (order(), &for_other_uid, "BelongsToAnother"),
            // An annotation on the home cluster cannot hand over a Tenant that the home cluster did not place.
            (adoption(), &unmanaged, "AlreadyThere"),
            (adoption(), &for_other_uid, "update"),
            (adoption(), &ours, "Placed"),
            (restored(), &for_other_uid, "update"),
            (restored(), &unmanaged, "AlreadyThere"),
            (
                PlacedTenant {
                    remove: true,
                    ..restored()
                },
                &for_other_uid,
                "delete",
            ),
            (removal(), &None, "confirm"),
            (removal(), &ours, "delete"),
            (removal(), &other_workspace, "delete"),
            (removal(), &terminating, "Deleting"),
            (removal(), &unmanaged, "confirm"),
            (removal(), &for_other_uid, "confirm"),
            (
                order_with(|order| (order.remove, order.adopt) = (true, true)),
                &for_other_uid,
                "confirm",
            ),
            (order_with(|order| order.paused = true), &None, "Paused"),
            (order_with(|order| order.paused = true), &ours, "update"),
            (order_with(|order| order.paused = true), &paused, "Placed"),
            // A pause also stops a deletion, which continues after it.
            (removal_paused(), &ours, "update"),
            (removal_paused(), &paused, "Paused"),
            (removal_paused(), &terminating, "update"),
            (removal_paused(), &terminating_paused, "Deleting"),
            (removal(), &paused, "update"),
            (removal(), &terminating_paused, "update"),
            (order(), &terminating_paused, "Deleting"),
            (
                order_with(|order| order.requested = Some("now".to_owned())),
                &ours,
                "update",
            ),
        ];
        for (order, tenant, expected) in table {
            let step = next_step(order, tenant.as_ref());
            assert_eq!(reason_or_name(&step), *expected, "{order:?} {tenant:?}");
            // After any update, the next check has nothing to write.
            if let PlacementStep::Update(desired) = step {
                let next = next_step(order, Some(&desired));
                assert_ne!(reason_or_name(&next), "update", "{order:?} {tenant:?}");
                assert!(order.remove || reason_or_name(&next) == "Placed");
                let versions = tenant
                    .as_ref()
                    .map(|tenant| &tenant.metadata.resource_version);
                assert_eq!(Some(&desired.metadata.resource_version), versions);
            }
        }
    }

    #[test]
    fn held_member_is_not_written_but_shows_placed() {
        let ours = created_tenant(&order());
        let hold = Some((reason::PAUSED, "paused on the EdgeCluster"));
        for (order, tenant, expected) in [
            (order(), None, "Paused"),
            (order(), Some(&ours), "Placed"),
            (removal(), Some(&ours), "Paused"),
            // While the member is held, it does not report a removal.
            (removal(), None, "Paused"),
        ] {
            let view = PlacementView {
                hold,
                ..view(tenant)
            };
            let step = decide(&order, &view);
            assert_eq!(reason_or_name(&step), expected, "{order:?}");
        }
    }

    #[test]
    fn missing_namespace_is_created_and_terminating_is_awaited() {
        for (namespace_terminating, order, expected) in [
            (None, order(), "create-namespace"),
            (Some(true), order(), "NamespaceTerminating"),
            (Some(false), order(), "create"),
            (None, removal(), "confirm"),
            (Some(true), removal(), "confirm"),
        ] {
            let view = PlacementView {
                namespace_terminating,
                ..view(None)
            };
            assert_eq!(reason_or_name(&decide(&order, &view)), expected);
        }
    }

    #[test]
    fn removal_is_confirmed_when_no_own_tenant_remains() {
        let ours = created_tenant(&order());
        let foreign = created_tenant(&order_with(|order| order.uid = "home-0".to_owned()));
        assert!(is_removal_confirmed(&removal(), None));
        assert!(is_removal_confirmed(&removal(), Some(&foreign)));
        assert!(!is_removal_confirmed(&removal(), Some(&ours)));
        let restored = PlacedTenant {
            former_uids: vec!["home-0".to_owned()],
            ..removal()
        };
        assert!(!is_removal_confirmed(&restored, Some(&foreign)));
    }

    #[test]
    fn placed_tenant_names_no_member_and_records_owner() {
        let tenant = as_ordered(
            &order_with(|order| order.paused = true),
            created_tenant(&order()),
        );
        assert_eq!(tenant.referenced_member(), None);
        assert!(tenant.is_for("edge-1", None));
        assert_eq!(tenant.spec.workspace.as_deref(), Some("acme-ws"));
        assert_eq!(tenant.labels()[MANAGED_BY_LABEL], MANAGED_BY_HUB);
        assert_eq!(tenant.annotations()[HOME_UID_ANNOTATION], "home-1");
        assert_eq!(tenant.annotations()[PAUSED_ANNOTATION], "true");
        assert_eq!(tenant.metadata.finalizers, None);
    }
}
