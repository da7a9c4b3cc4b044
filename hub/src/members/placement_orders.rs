//! Orders to place Tenants of the home cluster on members.

use std::collections::BTreeSet;

use krypton_types::placed_tenant::{PlacedReport, PlacedTenant};
use krypton_types::tenant::TenantKey;

use crate::members::remote_orders::{Order, RemoteOrders};

/// Maximum number of placed Tenants on one member.
pub const PLACED_MAX: usize = 2_000;
/// Maximum size of all placed Tenants of a member as JSON, in bytes. The member records them in a Secret of 1
/// MiB, together with the chart's values and the deployments' orders.
const PLACED_BYTES_MAX: usize = 384 * 1024;

pub type PlacementOrders = RemoteOrders<PlacedTenant>;

impl Order for PlacedTenant {
    type Key = TenantKey;
    type Report = PlacedReport;
    const MAX: usize = PLACED_MAX;

    fn key(&self) -> TenantKey {
        self.key()
    }
}

/// Selects the orders that fit one member: removals first, then Tenants by age on the home cluster, in seconds
/// since 1970. Also returns the keys of the others. The member leaves these Tenants as they are.
pub(crate) fn fit(orders: Vec<(i64, PlacedTenant)>) -> (Vec<PlacedTenant>, BTreeSet<TenantKey>) {
    let mut orders = orders;
    orders.sort_by_key(|(created, order)| (!order.remove, *created, order.key()));
    let (mut free_bytes, mut fitting, mut rest) = (PLACED_BYTES_MAX, Vec::new(), BTreeSet::new());
    for (_, order) in orders {
        // Serialization to memory does not fail for these types.
        let size = serde_json::to_vec(&order).map_or(usize::MAX, |json| json.len() + 1);
        if fitting.len() < PLACED_MAX && size <= free_bytes {
            free_bytes -= size;
            fitting.push(order);
        } else {
            rest.insert(order.key());
        }
    }
    (fitting, rest)
}

#[cfg(test)]
mod tests {
    use krypton_types::placed_tenant::PlacedSpec;

    use super::*;

    fn order(name: &str, size: usize, remove: bool) -> PlacedTenant {
        let values = [("v".to_owned(), "x".repeat(size).into())];
        PlacedTenant {
            namespace: "team".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-of-{name}"),
            spec: PlacedSpec {
                workspace: None,
                values: (!remove).then(|| values.into_iter().collect()),
                service_account_name: None,
            },
            remove,
            ..PlacedTenant::default()
        }
    }

    #[test]
    fn two_thousand_ordinary_tenants_fit_but_no_more() {
        let plain = |number: usize| {
            let name = format!("tenant-number-{number:05}");
            PlacedTenant {
                uid: "01234567-89ab-cdef-0123-456789abcdef".to_owned(),
                spec: PlacedSpec {
                    workspace: Some(format!("{name}-ws")),
                    values: None,
                    service_account_name: None,
                },
                generation: 1,
                ..order(&name, 0, true)
            }
        };
        let many = (0..=PLACED_MAX).map(|number| (number as i64, plain(number)));
        let (fitting, rest) = fit(many.collect());
        assert_eq!(fitting.len(), PLACED_MAX);
        assert_eq!(rest, [plain(PLACED_MAX).key()].into());
    }

    #[test]
    fn removals_fit_before_older_then_younger_tenants() {
        let large = PLACED_BYTES_MAX / 2 - 1024;
        let (old, young) = (order("old", large, false), order("young", large, false));
        let (middle, removal) = (order("middle", large, false), order("goes", 0, true));
        let orders = vec![
            (3, young.clone()),
            (2, middle.clone()),
            (1, old.clone()),
            (9, removal.clone()),
        ];
        let (fitting, rest) = fit(orders);
        assert_eq!(fitting, [removal, old, middle]);
        assert_eq!(rest, [young.key()].into());
    }
}
