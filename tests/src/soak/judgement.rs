//! Compares the observed state with the expected state, as a pure function of both.

use std::collections::BTreeMap;

use krypton_types::{desired::ChartState, names};
use serde_json::{Map, Value};

use super::{
    snapshot::{EdgeSeen, NamespaceSeen, ObjectKey, RevisionSeen, Snapshot, TenantSeen},
    whom::{Edge, HubId, Object, Tenant, Workspace},
};

pub(crate) const CHART: &str = "small";
pub(crate) const FOREIGN_FINALIZER: &str = "soak.example.org/hold";

/// A violated guarantee.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    /// Name of the guarantee.
    pub(crate) promise: &'static str,
    /// The object and its observed state.
    pub(crate) details: String,
}

/// Expected state of one Tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpectedTenant {
    pub(crate) workspace: Workspace,
    /// The Tenant also has a foreign finalizer.
    pub(crate) has_foreign_finalizer: bool,
}

/// The expected state at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ExpectedFleet {
    pub(crate) repository: String,
    pub(crate) version: String,
    pub(crate) message: String,
    pub(crate) replicas: u32,
    pub(crate) hubs: usize,
    pub(crate) tenants: BTreeMap<Tenant, ExpectedTenant>,
    /// Content of an edge cluster's foreign objects when they were created.
    pub(crate) foreign: BTreeMap<(Edge, String), String>,
}

impl ExpectedFleet {
    fn chart(&self) -> ChartState {
        let values = [
            ("message".to_owned(), Value::from(self.message.as_str())),
            ("replicaCount".to_owned(), Value::from(self.replicas)),
        ];
        ChartState {
            repo: self.repository.clone(),
            name: CHART.to_owned(),
            version: self.version.clone(),
            values: Map::from_iter(values),
            ..ChartState::default()
        }
    }

    /// Returns the content of each object of the chart, as its templates define it.
    fn content(&self, object: Object) -> BTreeMap<String, String> {
        let pairs: &[(&str, String)] = match object {
            Object::ConfigMap => &[
                ("message", self.message.clone()),
                ("version", self.version.clone()),
            ],
            Object::Service => &[("ports", "[(80, Some(Int(8080)))]".to_owned())],
            Object::Deployment => &[
                ("replicas", format!("Some({})", self.replicas)),
                ("version", self.version.clone()),
            ],
        };
        let owned = |(key, value): &(&str, String)| ((*key).to_owned(), value.clone());
        pairs.iter().map(owned).collect()
    }
}

/// Returns all differences between the observed and the expected state.
pub(crate) fn find_violations(expected: &ExpectedFleet, snapshot: &Snapshot) -> Vec<Violation> {
    let mut checker = StateChecker {
        expected,
        fingerprint: expected.chart().fingerprint(),
        chart: expected.chart().applied_name(),
        violations: Vec::new(),
    };
    let empty_state = EdgeSeen::default();
    for edge in Edge::ALL {
        let edge_state = snapshot.edges.get(&edge).unwrap_or(&empty_state);
        for (tenant, tenant_state) in &expected.tenants {
            if tenant.edge() == edge {
                checker.check_tenant(*tenant, tenant_state, edge_state);
                checker.check_release(*tenant, tenant_state, edge_state);
                checker.check_objects(*tenant, tenant_state, edge_state);
                checker.check_home_status(*tenant, snapshot.home.get(&tenant.name()));
            }
        }
        checker.check_leftovers(edge, edge_state);
        checker.check_foreign(edge, edge_state);
        checker.check_member(edge, snapshot);
    }
    for name in snapshot.home.keys() {
        if !expected.tenants.keys().any(|tenant| tenant.name() == *name) {
            checker.report(
                "a deleted Tenant leaves nothing",
                format!("Tenant {name} is on home"),
            );
        }
    }
    checker.check_leadership(snapshot);
    checker.violations.sort();
    checker.violations
}

struct StateChecker<'a> {
    expected: &'a ExpectedFleet,
    fingerprint: String,
    chart: String,
    violations: Vec<Violation>,
}

impl StateChecker<'_> {
    fn report(&mut self, promise: &'static str, details: String) {
        self.violations.push(Violation { promise, details });
    }

    fn check_tenant(
        &mut self,
        tenant: Tenant,
        tenant_state: &ExpectedTenant,
        edge_state: &EdgeSeen,
    ) {
        let name = format!("Tenant {} on {}", tenant.name(), tenant.edge().name());
        let Some(observed) = edge_state.tenants.get(&tenant.name()) else {
            return self.report("a live Tenant stays", format!("{name} is missing"));
        };
        if observed.deleting {
            self.report("a live Tenant stays", format!("{name} is being deleted"));
        }
        let workspace = tenant_state.workspace.namespace(tenant);
        if observed.workspace != workspace {
            let details = format!("{name}: workspace {}, not {workspace}", observed.workspace);
            self.report("the spec is unchanged", details);
        }
        let has = |finalizer: &str| {
            observed
                .finalizers
                .iter()
                .any(|present| present == finalizer)
        };
        if !has(names::TENANT_FINALIZER) {
            let details = format!("{name}: {:?}", observed.finalizers);
            self.report("no finalizer is lost", details);
        }
        if tenant_state.has_foreign_finalizer != has(FOREIGN_FINALIZER) {
            let details = format!("{name}: {:?}", observed.finalizers);
            self.report("no foreign finalizer is changed", details);
        }
        self.check_status(&name, observed);
    }

    fn check_status(&mut self, name: &str, tenant: &TenantSeen) {
        let ready = tenant.conditions.get("Ready");
        let is_true = ready.is_some_and(|(status, ..)| status == "True");
        let complete = is_true && tenant.phase == "Ready" && tenant.observed == tenant.generation;
        if !complete || tenant.chart != self.chart {
            let details = format!(
                "{name}: phase {:?}, generation {} and observed {}, chart {:?}; {}",
                tenant.phase,
                tenant.generation,
                tenant.observed,
                tenant.chart,
                tenant.describe()
            );
            self.report("the status is correct", details);
        }
    }

    fn check_home_status(&mut self, tenant: Tenant, observed: Option<&TenantSeen>) {
        let name = format!("Tenant {} on home", tenant.name());
        let Some(observed) = observed else {
            return self.report("home's status is correct", format!("{name} is missing"));
        };
        let kind = format!("ClusterReady/{}", tenant.edge().name());
        let member_condition = observed.conditions.get(&kind);
        let has_others = observed
            .conditions
            .keys()
            .any(|other| other.starts_with("ClusterReady/") && *other != kind);
        if has_others || member_condition.is_none_or(|(status, ..)| status != "True") {
            self.report(
                "home's status is correct",
                format!("{name}: {}", observed.describe()),
            );
        }
        self.check_status(&name, observed);
    }

    fn check_release(
        &mut self,
        tenant: Tenant,
        tenant_state: &ExpectedTenant,
        edge_state: &EdgeSeen,
    ) {
        let release = tenant.release();
        let workspace = tenant_state.workspace.namespace(tenant);
        let all = edge_state
            .releases
            .iter()
            .filter(|((_, name), _)| *name == release);
        for ((namespace, _), revisions) in all.clone() {
            if *namespace != workspace {
                let details = format!(
                    "{release} in {namespace} too: {}",
                    describe_revisions(revisions)
                );
                self.report("there is one release", details);
            }
        }
        let own = all
            .clone()
            .find(|((namespace, _), _)| *namespace == workspace);
        let Some((_, revisions)) = own else {
            let details = format!("{release} is not in {workspace}");
            return self.report("there is one release", details);
        };
        let deployed = revisions
            .iter()
            .filter(|revision| revision.status == "deployed");
        let locked = |revision: &RevisionSeen| {
            revision.status.ends_with("ing") || revision.status.starts_with("pending")
        };
        let newest = revisions.last();
        let newest_deployed = newest.is_some_and(|revision| revision.status == "deployed");
        if deployed.count() != 1 || !newest_deployed || revisions.iter().any(locked) {
            let details = format!(
                "{release} in {workspace}: {}",
                describe_revisions(revisions)
            );
            self.report("one revision, the newest, is deployed", details);
        }
        let Some(newest) = newest else {
            return;
        };
        let content = Ok(("deployed".to_owned(), self.expected.version.clone()));
        if newest.fingerprint != self.fingerprint || newest.content != content {
            let details = format!(
                "{release} in {workspace}: fingerprint {} of {}, {:?}",
                newest.fingerprint, self.fingerprint, newest.content
            );
            self.report("the release is the desired one", details);
        }
    }

    fn check_objects(
        &mut self,
        tenant: Tenant,
        tenant_state: &ExpectedTenant,
        edge_state: &EdgeSeen,
    ) {
        let release = tenant.release();
        let key = (tenant_state.workspace.namespace(tenant), release.clone());
        for kind in Object::ALL {
            let object = edge_state.objects.get(&(kind, key.clone()));
            let expected = self.expected.content(kind);
            let matches_chart = object
                .is_some_and(|object| object.release == release && object.content == expected);
            if !matches_chart {
                let details = format!(
                    "{kind:?} {release} in {}: {object:?}, not {expected:?}",
                    key.0
                );
                self.report("the objects match the chart", details);
            }
        }
    }

    /// Reports objects that belong to no live Tenant.
    fn check_leftovers(&mut self, edge: Edge, edge_state: &EdgeSeen) {
        let promise = "a deleted Tenant leaves nothing";
        let expected_tenants: BTreeMap<ObjectKey, Tenant> = self
            .expected
            .tenants
            .iter()
            .filter(|(tenant, _)| tenant.edge() == edge)
            .map(|(tenant, tenant_state)| {
                (
                    (tenant_state.workspace.namespace(*tenant), tenant.release()),
                    *tenant,
                )
            })
            .collect();
        let is_expected = |name: &str| {
            expected_tenants
                .values()
                .any(|tenant| tenant.name() == name)
        };
        let edge = edge.name();
        for name in edge_state.tenants.keys().filter(|name| !is_expected(name)) {
            let summary = edge_state.tenants.get(name).map(TenantSeen::describe);
            let details = format!("Tenant {name} on {edge}: {}", summary.unwrap_or_default());
            self.report(promise, details);
        }
        // A live Tenant's release in a wrong namespace is reported elsewhere.
        let has_no_tenant = |release: &str| {
            release.starts_with("tenant-")
                && !expected_tenants
                    .values()
                    .any(|tenant| tenant.release() == release)
        };
        for ((namespace, release), revisions) in &edge_state.releases {
            if has_no_tenant(release) {
                let details = format!(
                    "{release} in {namespace} on {edge}: {}",
                    describe_revisions(revisions)
                );
                self.report(promise, details);
            }
        }
        for ((kind, (namespace, name)), object) in &edge_state.objects {
            let key = (namespace.clone(), object.release.clone());
            if object.release.starts_with("tenant-") && !expected_tenants.contains_key(&key) {
                let details = format!(
                    "{kind:?} {name} of {} in {namespace} on {edge}",
                    object.release
                );
                self.report(promise, details);
            }
        }
        for (
            name,
            NamespaceSeen {
                terminating,
                created_by_krypton,
            },
        ) in &edge_state.namespaces
        {
            let is_used = expected_tenants
                .keys()
                .any(|(namespace, _)| namespace == name);
            let within = format!(" {name}/");
            let has_others = edge_state
                .releases
                .keys()
                .any(|(namespace, _)| namespace == name)
                || edge_state.foreign.keys().any(|what| what.contains(&within));
            if *terminating || (*created_by_krypton && !is_used && !has_others) {
                let details = format!("namespace {name} on {edge}, terminating: {terminating}");
                self.report(promise, details);
            }
        }
    }

    fn check_foreign(&mut self, edge: Edge, edge_state: &EdgeSeen) {
        for ((expected_edge, object), previous) in &self.expected.foreign.clone() {
            let current = edge_state.foreign.get(object);
            if *expected_edge == edge && current != Some(previous) {
                let current = current.map_or("it is gone", String::as_str);
                let details = format!("{object} on {}: {current}; before: {previous}", edge.name());
                self.report("no foreign object is changed", details);
            }
        }
    }

    fn check_member(&mut self, edge: Edge, snapshot: &Snapshot) {
        let conditions = snapshot.members.get(edge.name());
        let is_true = |kind: &str| {
            conditions
                .and_then(|conditions| conditions.get(kind))
                .is_some_and(|(status, ..)| status == "True")
        };
        if !is_true("Connected") || !is_true("Healthy") {
            let details = format!("EdgeCluster {}: {conditions:?}", edge.name());
            self.report("home's status is correct", details);
        }
    }

    fn check_leadership(&mut self, snapshot: &Snapshot) {
        let leading: Vec<HubId> = (snapshot.hubs.iter())
            .filter_map(|(hub_id, is_leader)| is_leader.then_some(*hub_id))
            .collect();
        let holder = HubId::holding(&snapshot.holder);
        let all_respond = snapshot.hubs.len() == self.expected.hubs;
        if !all_respond || leading.len() != 1 || holder != leading.first().copied() {
            let states =
                |(hub_id, is_leader): (&HubId, &bool)| format!("{}: {is_leader}", hub_id.name());
            let states: Vec<String> = snapshot.hubs.iter().map(states).collect();
            let details = format!(
                "{} hubs, leading: {states:?}; the Lease holder is {:?}",
                self.expected.hubs, snapshot.holder
            );
            self.report("exactly one hub leads", details);
        }
    }
}

fn describe_revisions(revisions: &[RevisionSeen]) -> String {
    let line = |revision: &RevisionSeen| match &revision.content {
        Ok((status, version)) => {
            format!(
                "v{} {} ({status} of {version})",
                revision.number, revision.status
            )
        }
        Err(error) => format!("v{} {} ({error})", revision.number, revision.status),
    };
    revisions.iter().map(line).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[path = "judgement_tests.rs"]
mod tests;
