//! One run of a fleet.

use krypton_sim_helm::chart::TestChart;
use serde_json::json;

use crate::conductor::{Millis, Simulation};
use crate::observe::Observation;
use crate::stage::{self, Access, Fleet, HOME, condition};

const SECOND: Millis = 1000;

/// Starts a fleet, and waits until all Tenants are ready.
pub fn smoke(simulation: &mut Simulation, mut see: impl FnMut(&Observation)) -> anyhow::Result<()> {
    let chart = simulation.folder().join("app-1.0.0.tgz");
    let app = TestChart::new("app", "1.0.0").object(json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "$RELEASE-config"},
        "data": {"version": "$CHART_VERSION"},
    }));
    app.to_tgz(&chart)?;
    let fleet = Fleet {
        hubs: 1,
        edges: vec![Access::Kubeconfig, Access::Agent],
        chart,
        chart_version: "1.0.0".to_owned(),
        hub_flags: Vec::new(),
    };
    fleet.start(simulation)?;
    let mut until =
        |simulation: &mut Simulation, limit: Millis, done: &dyn Fn(&Simulation) -> bool| {
            let limit = simulation.now() + limit;
            loop {
                for observation in simulation.observations() {
                    see(&observation);
                }
                if done(simulation) {
                    return Ok(());
                }
                if !simulation.step(limit) {
                    anyhow::bail!("not done after {limit} ms");
                }
            }
        };
    until(simulation, 60 * SECOND, &|simulation| {
        stage::join_info(simulation).is_some()
    })?;
    for (index, access) in fleet.edges.iter().enumerate() {
        if *access == Access::Agent {
            fleet.join(simulation, index)?;
        }
    }
    until(simulation, 120 * SECOND, &|simulation| {
        let Some(home) = simulation.cluster(HOME) else {
            return false;
        };
        let members = home.server.all("mesh.openkcm.io", "edgeclusters");
        let connected = members
            .iter()
            .filter(|member| condition(member, "Connected"));
        let served = (0..fleet.edges.len())
            .all(|index| stage::serves_tenants(simulation, &stage::edge(index)));
        served && connected.count() > fleet.edges.len()
    })?;
    for (index, _) in fleet.edges.iter().enumerate() {
        let tenant = json!({
            "apiVersion": "mesh.openkcm.io/v1alpha1",
            "kind": "Tenant",
            "metadata": {"name": "acme"},
            "spec": {},
        });
        let path = "/apis/mesh.openkcm.io/v1alpha1/namespaces/default/tenants";
        stage::create(simulation, &stage::edge(index), path, &tenant)?;
    }
    until(simulation, 120 * SECOND, &|simulation| {
        (0..fleet.edges.len()).all(|index| {
            let edge = simulation.cluster(&stage::edge(index));
            let tenants = edge.map(|edge| edge.server.all("mesh.openkcm.io", "tenants"));
            tenants.is_some_and(|tenants| tenants.iter().all(|tenant| condition(tenant, "Ready")))
        })
    })?;
    Ok(())
}
