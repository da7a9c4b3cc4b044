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
pub struct View<'a> {
    /// The Tenant with the namespace and name of the order.
    pub found: Option<&'a Tenant>,
    /// Whether the namespace is being deleted. `None` if it does not exist.
    pub terminating: Option<bool>,
    /// Reason and message if nothing may be written.
    pub held: Option<(&'static str, &'a str)>,
}

/// The next step.
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
pub fn confirmed(order: &PlacedTenant, found: Option<&Tenant>) -> bool {
    let uid = found.and_then(home_uid);
    !uid.is_some_and(|uid| order.is_for(uid))
}

pub fn decide(order: &PlacedTenant, view: &View<'_>) -> PlacementStep {
    let step = match view.found {
        None => absent(order, view),
        Some(found) => present(order, found),
    };
    match (view.held, step) {
        (_, PlacementStep::Settled(state)) => PlacementStep::Settled(state),
        (Some((why, message)), _) => {
            PlacementStep::Settled(State::new(Truth::Unknown, why, message))
        }
        (None, step) => step,
    }
}

fn absent(order: &PlacedTenant, view: &View<'_>) -> PlacementStep {
    if order.remove {
        let message = "deleted the Tenant on this cluster, as the home cluster requested";
        return PlacementStep::Confirm(not(reason::TENANT_GONE, message));
    }
    if order.paused {
        return PlacementStep::Settled(not(
            reason::PAUSED,
            "not created while it is paused on the home cluster",
        ));
    }
    match view.terminating {
        None => PlacementStep::CreateNamespace,
        Some(true) => {
            let message = format!(
                "namespace {} is being deleted on this cluster; waiting until it is gone",
                order.namespace
            );
            PlacementStep::Settled(not(reason::NAMESPACE_TERMINATING, &message))
        }
        Some(false) => {
            let mut tenant = Tenant::new(&order.name, TenantSpec::default());
            tenant.metadata.namespace = Some(order.namespace.clone());
            PlacementStep::Create(Box::new(ordered(order, tenant)))
        }
    }
}

fn present(order: &PlacedTenant, found: &Tenant) -> PlacementStep {
    match home_uid(found) {
        None => return others(order, reason::ALREADY_THERE, &already_there(order)),
        Some(uid) if order.is_for(uid) => {}
        Some(_) if order.adopt && !order.remove => {}
        Some(uid) => {
            let message = format!(
                "the home cluster placed Tenant {} on this cluster for another object, with UID {uid}; to adopt it, set annotation {}=true on the Tenant on the home cluster",
                order.key(),
                krypton_types::names::ADOPT_ANNOTATION
            );
            return others(order, reason::BELONGS_TO_ANOTHER, &message);
        }
    }
    if order.remove {
        let mut aside = found.clone();
        put_aside(order, &mut aside);
        // While the Tenant is paused here, its deletion waits. The pause follows the home cluster until the end.
        if aside != *found {
            return PlacementStep::Update(Box::new(aside));
        }
    }
    if found.metadata.deletion_timestamp.is_some() {
        let message = match order.remove {
            true => "deleting the Tenant on this cluster, as the home cluster requested",
            false => {
                "another client deletes the Tenant on this cluster; it is created again after the deletion"
            }
        };
        return PlacementStep::Settled(not(reason::DELETING, message));
    }
    if order.remove {
        return match order.paused {
            true => PlacementStep::Settled(not(
                reason::PAUSED,
                "deletion waits: paused by annotation on the home cluster",
            )),
            false => PlacementStep::Delete(found.uid().unwrap_or_default()),
        };
    }
    let wanted = ordered(order, found.clone());
    if wanted == *found {
        let message = format!(
            "Tenant {} on this cluster matches the home cluster",
            order.key()
        );
        return PlacementStep::Settled(State::new(Truth::True, reason::PLACED, message));
    }
    PlacementStep::Update(Box::new(wanted))
}

/// A Tenant that the home cluster did not place stays unchanged. A removal order does not delete it.
fn others(order: &PlacedTenant, why: &str, message: &str) -> PlacementStep {
    match order.remove {
        true => PlacementStep::Confirm(not(why, &format!("{message}; it is left where it is"))),
        false => PlacementStep::Settled(not(why, message)),
    }
}

fn already_there(order: &PlacedTenant) -> String {
    format!(
        "this cluster has a Tenant {} that the home cluster did not create; Krypton does not adopt it, but shows its conditions",
        order.key()
    )
}

/// Returns the UID on the home cluster that the Tenant was placed for. `None` if it was not placed.
fn home_uid(tenant: &Tenant) -> Option<&str> {
    let labelled = tenant.labels().get(MANAGED_BY_LABEL)?;
    if labelled != MANAGED_BY_HUB {
        return None;
    }
    let uid = tenant.annotations().get(HOME_UID_ANNOTATION)?;
    Some(uid.as_str())
}

/// Returns the Tenant as ordered. Fields that the order does not set stay unchanged.
fn ordered(order: &PlacedTenant, mut tenant: Tenant) -> Tenant {
    tenant
        .labels_mut()
        .insert(MANAGED_BY_LABEL.to_owned(), MANAGED_BY_HUB.to_owned());
    let annotations = tenant.annotations_mut();
    annotations.insert(HOME_UID_ANNOTATION.to_owned(), order.uid.clone());
    if let Some(requested) = &order.requested {
        let key = RECONCILE_REQUESTED_ANNOTATION.to_owned();
        annotations.insert(key, requested.clone());
    }
    put_aside(order, &mut tenant);
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
fn put_aside(order: &PlacedTenant, tenant: &mut Tenant) {
    let annotations = tenant.annotations_mut();
    match order.paused {
        true => annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned()),
        false => annotations.remove(PAUSED_ANNOTATION),
    };
}

fn not(why: &str, message: &str) -> State {
    State::new(Truth::False, why, message)
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

    fn with(change: impl FnOnce(&mut PlacedTenant)) -> PlacedTenant {
        let mut order = order();
        change(&mut order);
        order
    }

    fn removal() -> PlacedTenant {
        with(|order| order.remove = true)
    }

    /// The Tenant that this order creates, as the API server stores it.
    fn made(order: &PlacedTenant) -> Tenant {
        let PlacementStep::Create(tenant) = at(order, None) else {
            panic!("it is not made");
        };
        let mut tenant = *tenant;
        tenant.metadata.uid = Some("edge-1".to_owned());
        tenant.metadata.resource_version = Some("7".to_owned());
        tenant
    }

    pub(super) fn at(order: &PlacedTenant, found: Option<&Tenant>) -> PlacementStep {
        let terminating = Some(false);
        let view = View {
            found,
            terminating,
            held: None,
        };
        decide(order, &view)
    }

    /// Returns the reason or the name of the step.
    fn word(placing: &PlacementStep) -> &str {
        match placing {
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
        let changed = |change: fn(&mut Tenant)| {
            let mut tenant = made(&order());
            change(&mut tenant);
            Some(tenant)
        };
        let ours = changed(|_| {});
        let by_hand = changed(|tenant| tenant.labels_mut().clear());
        let of_others = changed(|tenant| {
            let managers = tenant.labels_mut();
            managers.insert(MANAGED_BY_LABEL.to_owned(), "argo".to_owned());
        });
        let nameless = changed(|tenant| tenant.annotations_mut().clear());
        let of_another = changed(|tenant| {
            let annotations = tenant.annotations_mut();
            annotations.insert(HOME_UID_ANNOTATION.to_owned(), "home-0".to_owned());
        });
        let going = changed(|tenant| {
            tenant.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
        });
        let moved = changed(|tenant| tenant.spec.workspace = Some("mine".to_owned()));
        let aimed = changed(|tenant| {
            tenant.spec.cluster_ref = Some(ClusterRef {
                secret_name: Some("edge-9".to_owned()),
                secret_namespace: None,
            });
        });
        let paused = changed(|tenant| {
            let annotations = tenant.annotations_mut();
            annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned());
        });
        let going_paused = paused.clone().map(|mut tenant| {
            tenant.metadata.deletion_timestamp = Some(Time(jiff::Timestamp::UNIX_EPOCH));
            tenant
        });
        let annotated = changed(|tenant| {
            let annotations = tenant.annotations_mut();
            annotations.insert("mine".to_owned(), "stays".to_owned());
        });
        let adopts = || with(|order| order.adopt = true);
        let put_back = || with(|order| order.former_uid = Some("home-0".to_owned()));
        let removal_paused = || with(|order| (order.remove, order.paused) = (true, true));
        let table: &[(PlacedTenant, &Option<Tenant>, &str)] = &[
            (order(), &None, "create"),
            (order(), &ours, "Placed"),
            (order(), &annotated, "Placed"),
            (order(), &moved, "update"),
            (order(), &aimed, "update"),
            (order(), &paused, "update"),
            (order(), &going, "Deleting"),
            (order(), &by_hand, "AlreadyThere"),
            (order(), &of_others, "AlreadyThere"),
            (order(), &nameless, "AlreadyThere"),
            (order(), &of_another, "BelongsToAnother"),
            // An annotation on the home cluster cannot hand over a Tenant that the home cluster did not place.
            (adopts(), &by_hand, "AlreadyThere"),
            (adopts(), &of_another, "update"),
            (adopts(), &ours, "Placed"),
            (put_back(), &of_another, "update"),
            (put_back(), &by_hand, "AlreadyThere"),
            (
                PlacedTenant {
                    remove: true,
                    ..put_back()
                },
                &of_another,
                "delete",
            ),
            (removal(), &None, "confirm"),
            (removal(), &ours, "delete"),
            (removal(), &moved, "delete"),
            (removal(), &going, "Deleting"),
            (removal(), &by_hand, "confirm"),
            (removal(), &of_another, "confirm"),
            (
                with(|order| (order.remove, order.adopt) = (true, true)),
                &of_another,
                "confirm",
            ),
            (with(|order| order.paused = true), &None, "Paused"),
            (with(|order| order.paused = true), &ours, "update"),
            (with(|order| order.paused = true), &paused, "Placed"),
            // A pause also stops a deletion, which continues after it.
            (removal_paused(), &ours, "update"),
            (removal_paused(), &paused, "Paused"),
            (removal_paused(), &going, "update"),
            (removal_paused(), &going_paused, "Deleting"),
            (removal(), &paused, "update"),
            (removal(), &going_paused, "update"),
            (order(), &going_paused, "Deleting"),
            (
                with(|order| order.requested = Some("now".to_owned())),
                &ours,
                "update",
            ),
        ];
        for (order, found, expected) in table {
            let placing = at(order, found.as_ref());
            assert_eq!(word(&placing), *expected, "{order:?} {found:?}");
            // After any update, the next check has nothing to write.
            if let PlacementStep::Update(wanted) = placing {
                let next = at(order, Some(&wanted));
                assert_ne!(word(&next), "update", "{order:?} {found:?}");
                assert!(order.remove || word(&next) == "Placed");
                let versions = found.as_ref().map(|found| &found.metadata.resource_version);
                assert_eq!(Some(&wanted.metadata.resource_version), versions);
            }
        }
    }

    #[test]
    fn held_member_is_not_written_but_shows_placed() {
        let ours = made(&order());
        let held = Some((reason::PAUSED, "paused on the EdgeCluster"));
        for (order, found, expected) in [
            (order(), None, "Paused"),
            (order(), Some(&ours), "Placed"),
            (removal(), Some(&ours), "Paused"),
            // While the member is held, it does not report a removal.
            (removal(), None, "Paused"),
        ] {
            let view = View {
                found,
                terminating: Some(false),
                held,
            };
            assert_eq!(word(&decide(&order, &view)), expected, "{order:?}");
        }
    }

    #[test]
    fn missing_namespace_is_created_and_terminating_is_awaited() {
        let found = None;
        for (terminating, order, expected) in [
            (None, order(), "create-namespace"),
            (Some(true), order(), "NamespaceTerminating"),
            (Some(false), order(), "create"),
            (None, removal(), "confirm"),
            (Some(true), removal(), "confirm"),
        ] {
            let view = View {
                found,
                terminating,
                held: None,
            };
            assert_eq!(word(&decide(&order, &view)), expected);
        }
    }

    #[test]
    fn removal_is_confirmed_when_no_own_tenant_remains() {
        let ours = made(&order());
        let theirs = made(&with(|order| order.uid = "home-0".to_owned()));
        assert!(confirmed(&removal(), None));
        assert!(confirmed(&removal(), Some(&theirs)));
        assert!(!confirmed(&removal(), Some(&ours)));
        let put_back = PlacedTenant {
            former_uid: Some("home-0".to_owned()),
            ..removal()
        };
        assert!(!confirmed(&put_back, Some(&theirs)));
    }

    #[test]
    fn placed_tenant_names_no_member_and_records_owner() {
        let tenant = ordered(&with(|order| order.paused = true), made(&order()));
        assert_eq!(tenant.names_member(), None);
        assert!(tenant.is_for("edge-1", None));
        assert_eq!(tenant.spec.workspace.as_deref(), Some("acme-ws"));
        assert_eq!(tenant.labels()[MANAGED_BY_LABEL], MANAGED_BY_HUB);
        assert_eq!(tenant.annotations()[HOME_UID_ANNOTATION], "home-1");
        assert_eq!(tenant.annotations()[PAUSED_ANNOTATION], "true");
        assert_eq!(tenant.metadata.finalizers, None);
    }
}
