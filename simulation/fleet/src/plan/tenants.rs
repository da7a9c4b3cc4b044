//! The Tenants that people want before and after a plan.

use std::collections::BTreeMap;

use super::{Action, Plan, PlannedTenant, Settings, TenantAction};

impl Settings {
    /// The actions that create the first Tenants. The stage applies them before the chaos, so oracles know that people
    /// want these Tenants.
    pub fn tenant_creations(&self) -> Vec<Action> {
        let creation = |tenant: &PlannedTenant| Action::Tenant {
            cluster: tenant.cluster.clone(),
            tenant: tenant.name.clone(),
            action: TenantAction::Create {
                placed_on: tenant.placed_on.clone(),
            },
        };
        self.tenants.iter().map(creation).collect()
    }
}

impl Plan {
    /// The Tenants that exist after all steps, by cluster and name.
    pub fn final_tenants(&self) -> BTreeMap<(String, String), PlannedTenant> {
        let first = self.settings.tenants.iter();
        let mut all: BTreeMap<_, _> = first
            .map(|tenant| {
                (
                    (tenant.cluster.clone(), tenant.name.clone()),
                    tenant.clone(),
                )
            })
            .collect();
        for step in &self.steps {
            let Action::Tenant {
                cluster,
                tenant,
                action,
            } = &step.action
            else {
                continue;
            };
            let key = (cluster.clone(), tenant.clone());
            match action {
                TenantAction::Create { placed_on } => {
                    all.entry(key).or_insert_with(|| PlannedTenant {
                        name: tenant.clone(),
                        cluster: cluster.clone(),
                        placed_on: placed_on.clone(),
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
