//! Histories of observations for the tests of oracles.

use std::sync::Arc;

use jiff::Timestamp;
use krypton_sim_apiserver::server::{Change, Key};
use krypton_types::names::{
    EPOCH_CONFIG_MAP, GROUP, HOME_UID_ANNOTATION, MANAGED_BY_HUB, MANAGED_BY_LABEL,
};
use serde_json::{Value, json};

use super::{Oracle, Oracles, Phase, Violation};
use crate::observe::{Event, HelmEnd, Observation};
use crate::time::Millis;
use crate::user_client::PEOPLE;

const PLAN: &str =
    "hubs 2\nedges edge-1:agent edge-2:kubeconfig\nself-cluster yes\nchaos 60.000\nquiet 90.000\n";

pub(super) const AGENT: &str = "agent-edge-1";
/// The release of the Tenant `t0` there.
pub(super) const RELEASE: &str = "tenant-t0-edge-1";

/// A history that all oracles check.
pub(super) struct History {
    oracles: Oracles,
    at: Millis,
    violation: Option<Violation>,
}

impl History {
    /// The fleet: an edge with an agent, one with a kubeconfig, and two hubs. All clusters have the CRD of Tenants.
    pub(super) fn new() -> Self {
        let mut history = Self::from_plan(PLAN);
        for cluster in ["home", "edge-1", "edge-2"] {
            history.put("people", cluster, tenant_crd());
        }
        history
    }

    /// The fleet with the Tenant `t0` on `edge-1` and fresh Leases.
    pub(super) fn with_tenant() -> Self {
        let mut history = Self::new();
        history.put("people", "edge-1", tenant()).renew_leases();
        history
    }

    /// A fleet of the plan's shape, without objects.
    pub(super) fn from_plan(plan: &str) -> Self {
        Self {
            oracles: Oracles::new(&plan.parse().unwrap()),
            at: 0,
            violation: None,
        }
    }

    /// A fleet that has converged, before its idle time.
    pub(super) fn converged() -> Self {
        let mut history = Self::with_tenant();
        for resource in ["edgeclusters", "kryptondeployments"] {
            history.put("people", "home", crd(resource));
        }
        let version = json!({"status": {
            "desired": {"epoch": 1, "generation": 4},
            "applied": {"epoch": 1, "generation": 4},
            "tenants": {"total": 1, "ready": 1},
        }});
        history
            .put("hub-0", "home", edge_cluster("edge-1"))
            .put("hub-0", "home", edge_cluster("edge-2"))
            .patch("hub-0", "home", edge_cluster("edge-1"), &version)
            .put_revision(RELEASE, 1, "deployed")
            .patch(AGENT, "edge-1", tenant(), &ready_patch(1));
        history
    }

    /// Checks a change of the converged fleet at the end of the idle time. Returns the oracle that failed.
    pub(super) fn violated_after(change: impl FnOnce(&mut Self)) -> Option<String> {
        let mut history = Self::converged();
        change(&mut history);
        history.check_converged();
        history.violated_oracle().map(str::to_owned)
    }

    /// Lets time pass.
    pub(super) fn wait(&mut self, millis: Millis) -> &mut Self {
        self.at += millis;
        self
    }

    pub(super) fn enter_phase(&mut self, phase: Phase) -> &mut Self {
        self.oracles.enter_phase(phase, self.at);
        self
    }

    pub(super) fn observe(&mut self, event: Event) -> &mut Self {
        let observation = Observation { at: self.at, event };
        if let Err(violation) = self.oracles.observe(&observation) {
            self.violation.get_or_insert(violation);
        }
        self
    }

    /// Writes an object. The actor is `people`, a host, `helm:HOST`, or the name of a controller.
    pub(super) fn put(&mut self, actor: &str, cluster: &str, object: Value) -> &mut Self {
        let key = object_key(&object);
        self.write(actor, cluster, key, Some(object))
    }

    /// Lets the Helm of the agent write a revision of a release.
    pub(super) fn put_revision(&mut self, release: &str, version: u32, status: &str) -> &mut Self {
        let revision = revision(release, version, status);
        self.put("helm:agent-edge-1", "edge-1", revision)
    }

    /// Merges into an object.
    pub(super) fn patch(
        &mut self,
        actor: &str,
        cluster: &str,
        object: Value,
        patch: &Value,
    ) -> &mut Self {
        let key = object_key(&object);
        let before = self.oracles.view().get(cluster, &key);
        let mut after = before.map_or(object, |before| before.as_ref().clone());
        merge(&mut after, patch);
        self.write(actor, cluster, key, Some(after))
    }

    pub(super) fn delete(&mut self, actor: &str, cluster: &str, object: &Value) -> &mut Self {
        self.write(actor, cluster, object_key(object), None)
    }

    fn write(&mut self, actor: &str, cluster: &str, key: Key, after: Option<Value>) -> &mut Self {
        let (by, host) = match actor.split_once(':') {
            Some((_, host)) => ("Helm/4.2.4".to_owned(), Some(host)),
            None if actor == "people" => (PEOPLE.to_owned(), None),
            None if actor.starts_with("hub-") => ("krypton-hub/0.1.0".to_owned(), Some(actor)),
            None if actor.starts_with("agent-") => ("krypton-agent/0.1.0".to_owned(), Some(actor)),
            None => (actor.to_owned(), None),
        };
        let before = self.oracles.view().get(cluster, &key).cloned();
        let change = Change {
            revision: 1,
            at: Timestamp::UNIX_EPOCH,
            key,
            before,
            after: after.map(Arc::new),
            by,
            subresource: String::new(),
        };
        self.observe(Event::Change {
            cluster: cluster.to_owned(),
            change,
        });
        if let Some(host) = host {
            self.respond(host, cluster, "PUT", "/x", 200);
        }
        self
    }

    pub(super) fn respond(
        &mut self,
        host: &str,
        cluster: &str,
        method: &str,
        path: &str,
        code: u16,
    ) -> &mut Self {
        self.observe(Event::Responded {
            host: host.to_owned(),
            nth: 1,
            cluster: cluster.to_owned(),
            method: method.to_owned(),
            path: path.to_owned(),
            code,
            from_fault: false,
        })
    }

    /// Starts Helm after the holder has renewed the member's Lease.
    pub(super) fn start_helm(
        &mut self,
        run: u64,
        host: &str,
        verb: &str,
        release: &str,
    ) -> &mut Self {
        self.observe(Event::HelmStarted {
            run,
            host: host.to_owned(),
            arguments: ["helm-verb", "--namespace", "t0", "--", release]
                .map(|word| if word == "helm-verb" { verb } else { word }.to_owned())
                .into(),
        })
    }

    pub(super) fn end_helm(&mut self, run: u64, host: &str, code: i32) -> &mut Self {
        self.observe(Event::HelmEnded {
            run,
            host: host.to_owned(),
            end: HelmEnd::Exited {
                code,
                stderr: String::new(),
            },
        })
    }

    pub(super) fn fault(&mut self, text: &str) -> &mut Self {
        self.observe(Event::Fault {
            text: text.to_owned(),
        })
    }

    pub(super) fn check_converged(&mut self) -> &mut Self {
        if let Err(violation) = self.oracles.check_converged(self.at) {
            self.violation.get_or_insert(violation);
        }
        self
    }

    /// The agent of `edge-1` renews its Lease, and the hub renews the Leases of the other members.
    pub(super) fn renew_leases(&mut self) -> &mut Self {
        for (host, cluster, name, holder) in [
            ("hub-0", "home", "krypton-hub", "hub/hub-0/1"),
            ("hub-0", "home", "krypton-agent", "hub/hub-0/1/self-cluster"),
            ("hub-0", "edge-2", "krypton-agent", "hub/hub-0/1/edge-2"),
            (AGENT, "edge-1", "krypton-agent", "agent/a/1"),
        ] {
            self.put(host, cluster, lease(name, holder));
        }
        self
    }

    /// Whether the oracle fails at the end of the idle time.
    pub(super) fn breaks(&self, mut oracle: impl Oracle) -> bool {
        oracle.check_converged(self.oracles.view()).is_err()
    }

    /// Name of the oracle that failed first.
    pub(super) fn violated_oracle(&self) -> Option<&str> {
        self.violation.as_ref().map(|violation| violation.oracle)
    }

    /// Fails unless this oracle has failed first, or none has.
    #[track_caller]
    pub(super) fn assert_outcome(&self, oracle: Option<&str>) {
        assert_eq!(self.violated_oracle(), oracle, "{:?}", self.violation);
    }

    #[track_caller]
    pub(super) fn assert_no_violation(&self) {
        self.assert_outcome(None);
    }

    #[track_caller]
    pub(super) fn assert_violated(&self, oracle: &str) {
        self.assert_outcome(Some(oracle));
    }
}

fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (field, value) in fields {
        match value {
            Value::Null => drop(object.as_object_mut().unwrap().remove(field)),
            value => merge(&mut object[field], value),
        }
    }
}

fn object_key(object: &Value) -> Key {
    let text = |pointer: &str| {
        let text = object.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    let version = text("/apiVersion");
    let group = version.split_once('/').map(|(group, _)| group.to_owned());
    let kind = text("/kind").to_lowercase();
    Key {
        group: group.unwrap_or_default(),
        resource: format!("{kind}s"),
        namespace: text("/metadata/namespace"),
        name: text("/metadata/name"),
    }
}

pub(super) fn tenant_crd() -> Value {
    crd("tenants")
}

pub(super) fn crd(resource: &str) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{resource}.{GROUP}")},
    })
}

/// A Tenant `t0` with Krypton's finalizer.
pub(super) fn tenant() -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "Tenant",
        "metadata": {
            "name": "t0",
            "namespace": "tenants",
            "uid": "uid-t0",
            "generation": 1,
            "finalizers": ["mesh.openkcm.io/cleanup"],
        },
        "spec": {},
    })
}

/// The copy of the Tenant `t0` of home with this UID, as the hub places it.
pub(super) fn copy(home_uid: &str) -> Value {
    let mut tenant = tenant();
    tenant["metadata"]["uid"] = json!("uid-copy");
    tenant["metadata"]["labels"] = json!({MANAGED_BY_LABEL: MANAGED_BY_HUB});
    tenant["metadata"]["annotations"] = json!({HOME_UID_ANNOTATION: home_uid});
    tenant
}

/// The patch that leaves an object with only this condition.
pub(super) fn condition_patch(kind: &str, status: &str) -> Value {
    json!({"status": {"conditions": [{"type": kind, "status": status, "reason": "Reason"}]}})
}

/// The patch that makes an object ready at this generation.
pub(super) fn ready_patch(generation: u64) -> Value {
    json!({"status": {
        "observedGeneration": generation,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
    }})
}

/// The patch that marks an object as being deleted.
pub(super) fn deletion_patch() -> Value {
    json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
}

pub(super) fn edge_cluster(name: &str) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "EdgeCluster",
        "metadata": {"name": name, "uid": format!("uid-{name}"), "generation": 1},
        "spec": {},
        "status": {
            "mode": "agent",
            "clusterUID": format!("cluster-{name}"),
            "conditions": [{"type": "Connected", "status": "True", "reason": "Connected"}],
        },
    })
}

pub(super) fn deployment(region: &str) -> Value {
    json!({
        "apiVersion": "mesh.openkcm.io/v1alpha1",
        "kind": "KryptonDeployment",
        "metadata": {"name": "d0", "namespace": "tenants", "uid": "uid-d0", "generation": 1},
        "spec": {"account": {"name": "a"}, "region": {"name": region}},
    })
}

/// A workload of the Tenant's release.
pub(super) fn workload() -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "app", "namespace": "t0"},
    })
}

pub(super) fn lease(name: &str, holder: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": "krypton-system"},
        "spec": {"holderIdentity": holder},
    })
}

/// A release Secret of the Tenant `t0` without a payload.
pub(super) fn revision(release: &str, version: u32, status: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "helm.sh/release.v1",
        "metadata": {
            "name": format!("sh.helm.release.v1.{release}.v{version}"),
            "namespace": "t0",
            "labels": {
                "owner": "helm",
                "name": release,
                "status": status,
                "version": version.to_string(),
                "mesh.openkcm.io/tenant-uid": if release == "ced-d0" { "uid-d0" } else { "uid-t0" },
            },
        },
    })
}

pub(super) fn config_map(namespace: &str, name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "uid": "u"},
    })
}

/// The record of the hubs' epoch.
pub(super) fn epoch(number: u32) -> Value {
    let mut map = config_map("krypton-system", EPOCH_CONFIG_MAP);
    map["data"] = json!({"epoch": number.to_string()});
    map
}

pub(super) fn namespace(name: &str, marked: bool) -> Value {
    let labels = match marked {
        true => json!({"mesh.openkcm.io/created-for": "uid-t0"}),
        false => json!({}),
    };
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
}
