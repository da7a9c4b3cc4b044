//! The Tenants that people want before and after a plan.

use std::collections::BTreeMap;

use super::{Action, Plan, Seat, Settings, TenantAction};

impl Settings {
    /// The actions that create the first Tenants. The stage applies them before the chaos, so oracles know that people
    /// want these Tenants.
    pub fn creations(&self) -> Vec<Action> {
        let creation = |seat: &Seat| Action::Tenant {
            cluster: seat.cluster.clone(),
            tenant: seat.tenant.clone(),
            what: TenantAction::Create {
                placed: seat.placed.clone(),
            },
        };
        self.tenants.iter().map(creation).collect()
    }
}

impl Plan {
    /// The Tenants that exist after all steps, by cluster and name.
    pub fn tenants_after(&self) -> BTreeMap<(String, String), Seat> {
        let first = self.settings.tenants.iter();
        let mut all: BTreeMap<_, _> = first
            .map(|seat| ((seat.cluster.clone(), seat.tenant.clone()), seat.clone()))
            .collect();
        for step in &self.steps {
            let Action::Tenant {
                cluster,
                tenant,
                what,
            } = &step.action
            else {
                continue;
            };
            let key = (cluster.clone(), tenant.clone());
            match what {
                TenantAction::Create { placed } => {
                    all.entry(key).or_insert_with(|| Seat {
                        tenant: tenant.clone(),
                        cluster: cluster.clone(),
                        placed: placed.clone(),
                    });
                }
                TenantAction::Delete | TenantAction::Orphan => {
                    all.remove(&key);
                }
                _ => {}
            }
        }
        all
    }
}
