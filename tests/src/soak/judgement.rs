//! Compares the observed state with the expected state, as a pure function of both.

use std::collections::BTreeMap;

use krypton_types::{desired::ChartState, names};
use serde_json::{Map, Value};

use super::{
    snapshot::{EdgeSeen, NamespaceSeen, Place, RevisionSeen, Snapshot, TenantSeen},
    whom::{Edge, Object, Seat, Tenant, Workspace},
};

pub(crate) const CHART: &str = "small";
pub(crate) const FOREIGN_FINALIZER: &str = "soak.example.org/hold";

/// A violated guarantee.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    /// Name of the guarantee.
    pub(crate) promise: &'static str,
    /// The object and its observed state.
    pub(crate) story: String,
}

/// Expected state of one Tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) workspace: Workspace,
    /// The Tenant also has a foreign finalizer.
    pub(crate) held: bool,
}

/// The expected state at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) repository: String,
    pub(crate) version: String,
    pub(crate) message: String,
    pub(crate) replicas: u32,
    pub(crate) hubs: usize,
    pub(crate) tenants: BTreeMap<Tenant, Wanted>,
    /// Content of an edge cluster's foreign objects when they were created.
    pub(crate) foreign: BTreeMap<(Edge, String), String>,
}

impl Expected {
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
pub(crate) fn judge(expected: &Expected, seen: &Snapshot) -> Vec<Violation> {
    let mut judge = Judge {
        expected,
        fingerprint: expected.chart().fingerprint(),
        chart: expected.chart().applied_name(),
        found: Vec::new(),
    };
    let nothing = EdgeSeen::default();
    for edge in Edge::ALL {
        let here = seen.edges.get(&edge).unwrap_or(&nothing);
        for (tenant, wanted) in &expected.tenants {
            if tenant.edge() == edge {
                judge.tenant(*tenant, wanted, here);
                judge.release(*tenant, wanted, here);
                judge.objects(*tenant, wanted, here);
                judge.home_status(*tenant, seen.home.get(&tenant.name()));
            }
        }
        judge.leftovers(edge, here);
        judge.foreign(edge, here);
        judge.member(edge, seen);
    }
    for name in seen.home.keys() {
        if !expected.tenants.keys().any(|tenant| tenant.name() == *name) {
            judge.say(
                "a deleted Tenant leaves nothing",
                format!("Tenant {name} is on home"),
            );
        }
    }
    judge.lead(seen);
    judge.found.sort();
    judge.found
}

struct Judge<'a> {
    expected: &'a Expected,
    fingerprint: String,
    chart: String,
    found: Vec<Violation>,
}

impl Judge<'_> {
    fn say(&mut self, promise: &'static str, story: String) {
        self.found.push(Violation { promise, story });
    }

    fn tenant(&mut self, tenant: Tenant, wanted: &Wanted, here: &EdgeSeen) {
        let name = format!("Tenant {} on {}", tenant.name(), tenant.edge().name());
        let Some(seen) = here.tenants.get(&tenant.name()) else {
            return self.say("a live Tenant stays", format!("{name} is missing"));
        };
        if seen.deleting {
            self.say("a live Tenant stays", format!("{name} is being deleted"));
        }
        let workspace = wanted.workspace.namespace(tenant);
        if seen.workspace != workspace {
            let story = format!("{name}: workspace {}, not {workspace}", seen.workspace);
            self.say("the spec is unchanged", story);
        }
        let has = |finalizer: &str| seen.finalizers.iter().any(|found| found == finalizer);
        if !has(names::TENANT_FINALIZER) {
            let story = format!("{name}: {:?}", seen.finalizers);
            self.say("no finalizer is lost", story);
        }
        if wanted.held != has(FOREIGN_FINALIZER) {
            let story = format!("{name}: {:?}", seen.finalizers);
            self.say("no foreign finalizer is changed", story);
        }
        self.status(&name, seen);
    }

    fn status(&mut self, name: &str, seen: &TenantSeen) {
        let ready = seen.conditions.get("Ready");
        let true_ = ready.is_some_and(|(status, ..)| status == "True");
        let complete = true_ && seen.phase == "Ready" && seen.observed == seen.generation;
        if !complete || seen.chart != self.chart {
            let story = format!(
                "{name}: phase {:?}, generation {} and observed {}, chart {:?}; {}",
                seen.phase,
                seen.generation,
                seen.observed,
                seen.chart,
                seen.describe()
            );
            self.say("the status is correct", story);
        }
    }

    fn home_status(&mut self, tenant: Tenant, seen: Option<&TenantSeen>) {
        let name = format!("Tenant {} on home", tenant.name());
        let Some(seen) = seen else {
            return self.say("home's status is correct", format!("{name} is missing"));
        };
        let kind = format!("ClusterReady/{}", tenant.edge().name());
        let of_member = seen.conditions.get(&kind);
        let others = seen
            .conditions
            .keys()
            .any(|other| other.starts_with("ClusterReady/") && *other != kind);
        if others || of_member.is_none_or(|(status, ..)| status != "True") {
            self.say(
                "home's status is correct",
                format!("{name}: {}", seen.describe()),
            );
        }
        self.status(&name, seen);
    }

    fn release(&mut self, tenant: Tenant, wanted: &Wanted, here: &EdgeSeen) {
        let release = tenant.release();
        let workspace = wanted.workspace.namespace(tenant);
        let all = here
            .releases
            .iter()
            .filter(|((_, name), _)| *name == release);
        for ((namespace, _), revisions) in all.clone() {
            if *namespace != workspace {
                let story = format!("{release} in {namespace} too: {}", shown(revisions));
                self.say("there is one release", story);
            }
        }
        let own = all
            .clone()
            .find(|((namespace, _), _)| *namespace == workspace);
        let Some((_, revisions)) = own else {
            let story = format!("{release} is not in {workspace}");
            return self.say("there is one release", story);
        };
        let deployed = revisions.iter().filter(|found| found.status == "deployed");
        let locked = |found: &RevisionSeen| {
            found.status.ends_with("ing") || found.status.starts_with("pending")
        };
        let newest = revisions.last();
        let newest_deployed = newest.is_some_and(|found| found.status == "deployed");
        if deployed.count() != 1 || !newest_deployed || revisions.iter().any(locked) {
            let story = format!("{release} in {workspace}: {}", shown(revisions));
            self.say("one revision, the newest, is deployed", story);
        }
        let Some(newest) = newest else {
            return;
        };
        let content = Ok(("deployed".to_owned(), self.expected.version.clone()));
        if newest.fingerprint != self.fingerprint || newest.content != content {
            let story = format!(
                "{release} in {workspace}: fingerprint {} of {}, {:?}",
                newest.fingerprint, self.fingerprint, newest.content
            );
            self.say("the release is the desired one", story);
        }
    }

    fn objects(&mut self, tenant: Tenant, wanted: &Wanted, here: &EdgeSeen) {
        let release = tenant.release();
        let place = (wanted.workspace.namespace(tenant), release.clone());
        for kind in Object::ALL {
            let seen = here.objects.get(&(kind, place.clone()));
            let expected = self.expected.content(kind);
            let as_it_should =
                seen.is_some_and(|seen| seen.release == release && seen.content == expected);
            if !as_it_should {
                let story = format!(
                    "{kind:?} {release} in {}: {seen:?}, not {expected:?}",
                    place.0
                );
                self.say("the objects match the chart", story);
            }
        }
    }

    /// Reports objects that belong to no live Tenant.
    fn leftovers(&mut self, edge: Edge, here: &EdgeSeen) {
        let promise = "a deleted Tenant leaves nothing";
        let live: BTreeMap<Place, Tenant> = self
            .expected
            .tenants
            .iter()
            .filter(|(tenant, _)| tenant.edge() == edge)
            .map(|(tenant, wanted)| {
                (
                    (wanted.workspace.namespace(*tenant), tenant.release()),
                    *tenant,
                )
            })
            .collect();
        let wanted = |name: &str| live.values().any(|tenant| tenant.name() == name);
        let edge = edge.name();
        for name in here.tenants.keys().filter(|name| !wanted(name)) {
            let summary = here.tenants.get(name).map(TenantSeen::describe);
            let story = format!("Tenant {name} on {edge}: {}", summary.unwrap_or_default());
            self.say(promise, story);
        }
        // A live Tenant's release in a wrong namespace is reported elsewhere.
        let nobodys = |release: &str| {
            release.starts_with("tenant-")
                && !live.values().any(|tenant| tenant.release() == release)
        };
        for ((namespace, release), revisions) in &here.releases {
            if nobodys(release) {
                let story = format!("{release} in {namespace} on {edge}: {}", shown(revisions));
                self.say(promise, story);
            }
        }
        for ((kind, (namespace, name)), seen) in &here.objects {
            let place = (namespace.clone(), seen.release.clone());
            if seen.release.starts_with("tenant-") && !live.contains_key(&place) {
                let story = format!(
                    "{kind:?} {name} of {} in {namespace} on {edge}",
                    seen.release
                );
                self.say(promise, story);
            }
        }
        for (name, NamespaceSeen { terminating, made }) in &here.namespaces {
            let used = live.keys().any(|(namespace, _)| namespace == name);
            let within = format!(" {name}/");
            let others = here.releases.keys().any(|(namespace, _)| namespace == name)
                || here.foreign.keys().any(|what| what.contains(&within));
            if *terminating || (*made && !used && !others) {
                let story = format!("namespace {name} on {edge}, terminating: {terminating}");
                self.say(promise, story);
            }
        }
    }

    fn foreign(&mut self, edge: Edge, here: &EdgeSeen) {
        for ((place, what), before) in &self.expected.foreign.clone() {
            let now = here.foreign.get(what);
            if *place == edge && now != Some(before) {
                let now = now.map_or("it is gone", String::as_str);
                let story = format!("{what} on {}: {now}; before: {before}", edge.name());
                self.say("no foreign object is changed", story);
            }
        }
    }

    fn member(&mut self, edge: Edge, seen: &Snapshot) {
        let conditions = seen.members.get(edge.name());
        let holds = |kind: &str| {
            conditions
                .and_then(|conditions| conditions.get(kind))
                .is_some_and(|(status, ..)| status == "True")
        };
        if !holds("Connected") || !holds("Healthy") {
            let story = format!("EdgeCluster {}: {conditions:?}", edge.name());
            self.say("home's status is correct", story);
        }
    }

    fn lead(&mut self, seen: &Snapshot) {
        let leading: Vec<Seat> = (seen.hubs.iter())
            .filter_map(|(seat, leads)| leads.then_some(*seat))
            .collect();
        let holds = Seat::holding(&seen.holder);
        let all_tell = seen.hubs.len() == self.expected.hubs;
        if !all_tell || leading.len() != 1 || holds != leading.first().copied() {
            let states = |(seat, leads): (&Seat, &bool)| format!("{}: {leads}", seat.name());
            let states: Vec<String> = seen.hubs.iter().map(states).collect();
            let story = format!(
                "{} hubs, leading: {states:?}; the Lease holder is {:?}",
                self.expected.hubs, seen.holder
            );
            self.say("exactly one hub leads", story);
        }
    }
}

fn shown(revisions: &[RevisionSeen]) -> String {
    let line = |found: &RevisionSeen| match &found.content {
        Ok((status, version)) => {
            format!("v{} {} ({status} of {version})", found.number, found.status)
        }
        Err(error) => format!("v{} {} ({error})", found.number, found.status),
    };
    revisions.iter().map(line).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[path = "judgement_tests.rs"]
mod tests;
