//! Histories for the tests of oracles.

use std::sync::Arc;

use jiff::Timestamp;
use krypton_sim_apiserver::server::{Change, Key};
use krypton_types::names::GROUP;
use serde_json::{Value, json};

use super::{Oracles, Phase, Violation};
use crate::conductor::Millis;
use crate::faults::PEOPLE;
use crate::observe::{Event, HelmEnd, Observation};

const PLAN: &str =
    "hubs 2\nedges edge-1:agent edge-2:kubeconfig\nself-cluster yes\nchaos 60.000\nquiet 90.000\n";

/// A history that all oracles check.
pub(super) struct Story {
    oracles: Oracles,
    at: Millis,
    violation: Option<Violation>,
}

impl Story {
    /// The fleet: an edge with an agent, one with a kubeconfig, and two hubs. All clusters have the CRD of Tenants.
    pub(super) fn new() -> Self {
        let mut story = Self {
            oracles: Oracles::new(&PLAN.parse().unwrap()),
            at: 0,
            violation: None,
        };
        for cluster in ["home", "edge-1", "edge-2"] {
            story.put("people", cluster, crd());
        }
        story
    }

    /// A fleet that has converged, before its idle time.
    pub(super) fn converged() -> Self {
        const AGENT: &str = "agent-edge-1";
        let mut story = Self::new();
        let version = json!({"status": {
            "desired": {"epoch": 1, "generation": 4},
            "applied": {"epoch": 1, "generation": 4},
            "tenants": {"total": 1},
        }});
        story
            .put("people", "edge-1", tenant())
            .renew()
            .put("hub-0", "home", edge_cluster("edge-1"))
            .put("hub-0", "home", edge_cluster("edge-2"))
            .patch("hub-0", "home", edge_cluster("edge-1"), &version)
            .put(
                "helm:agent-edge-1",
                "edge-1",
                revision("tenant-t0-edge-1", 1, "deployed"),
            )
            .patch(AGENT, "edge-1", tenant(), &ready(1));
        story
    }

    /// Checks a change of the converged fleet at the end of the idle time. Returns the oracle that failed.
    pub(super) fn after(change: impl FnOnce(&mut Self)) -> Option<String> {
        let mut story = Self::converged();
        change(&mut story);
        story.quiet();
        story.violated().map(str::to_owned)
    }

    /// Lets time pass.
    pub(super) fn wait(&mut self, millis: Millis) -> &mut Self {
        self.at += millis;
        self
    }

    pub(super) fn enter(&mut self, phase: Phase) -> &mut Self {
        self.oracles.enter(phase, self.at);
        self
    }

    pub(super) fn see(&mut self, event: Event) -> &mut Self {
        let seen = Observation { at: self.at, event };
        if let Err(violation) = self.oracles.see(&seen) {
            self.violation.get_or_insert(violation);
        }
        self
    }

    /// Writes an object. The actor is `people`, a host, `helm:HOST`, or the name of a controller.
    pub(super) fn put(&mut self, actor: &str, cluster: &str, object: Value) -> &mut Self {
        let key = key_of(&object);
        self.write(actor, cluster, key, Some(object))
    }

    /// Merges into an object.
    pub(super) fn patch(
        &mut self,
        actor: &str,
        cluster: &str,
        object: Value,
        patch: &Value,
    ) -> &mut Self {
        let key = key_of(&object);
        let before = self.oracles.view().get(cluster, &key);
        let mut after = before.map_or(object, |before| before.as_ref().clone());
        merge(&mut after, patch);
        self.write(actor, cluster, key, Some(after))
    }

    pub(super) fn delete(&mut self, actor: &str, cluster: &str, object: &Value) -> &mut Self {
        self.write(actor, cluster, key_of(object), None)
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
        self.see(Event::Change {
            cluster: cluster.to_owned(),
            change,
        });
        if let Some(host) = host {
            self.answered(host, cluster, "PUT", "/x", 200);
        }
        self
    }

    pub(super) fn answered(
        &mut self,
        host: &str,
        cluster: &str,
        method: &str,
        path: &str,
        code: u16,
    ) -> &mut Self {
        self.see(Event::Answered {
            host: host.to_owned(),
            nth: 1,
            cluster: cluster.to_owned(),
            method: method.to_owned(),
            path: path.to_owned(),
            code,
        })
    }

    /// Starts Helm after the holder has renewed the member's Lease.
    pub(super) fn helm(&mut self, run: u64, host: &str, verb: &str, release: &str) -> &mut Self {
        self.see(Event::HelmStarted {
            run,
            host: host.to_owned(),
            arguments: ["helm-verb", "--namespace", "t0", "--", release]
                .map(|word| if word == "helm-verb" { verb } else { word }.to_owned())
                .into(),
        })
    }

    pub(super) fn ends(&mut self, run: u64, host: &str, code: i32) -> &mut Self {
        self.see(Event::HelmEnded {
            run,
            host: host.to_owned(),
            how: HelmEnd::Exited {
                code,
                stderr: String::new(),
            },
        })
    }

    pub(super) fn fault(&mut self, text: &str) -> &mut Self {
        self.see(Event::Fault {
            text: text.to_owned(),
        })
    }

    pub(super) fn quiet(&mut self) -> &mut Self {
        if let Err(violation) = self.oracles.quiet(self.at) {
            self.violation.get_or_insert(violation);
        }
        self
    }

    /// The agent of `edge-1` renews its Lease, and the hub those of the other members.
    pub(super) fn renew(&mut self) -> &mut Self {
        self.put("hub-0", "home", lease("krypton-hub", "hub/hub-0/1"))
            .put(
                "hub-0",
                "home",
                lease("krypton-agent", "hub/hub-0/1/self-cluster"),
            )
            .put(
                "hub-0",
                "edge-2",
                lease("krypton-agent", "hub/hub-0/1/edge-2"),
            )
            .put(
                "agent-edge-1",
                "edge-1",
                lease("krypton-agent", "agent/a/1"),
            )
    }

    pub(super) fn view(&self) -> &super::View {
        self.oracles.view()
    }

    /// Name of the oracle that failed first.
    pub(super) fn violated(&self) -> Option<&str> {
        self.violation.as_ref().map(|violation| violation.oracle)
    }

    pub(super) fn assert_kept(&self) {
        assert_eq!(self.violation, None);
    }

    pub(super) fn assert_broken(&self, oracle: &str) {
        assert_eq!(self.violated(), Some(oracle), "{:?}", self.violation);
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

fn key_of(object: &Value) -> Key {
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

pub(super) fn crd() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("tenants.{GROUP}")},
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

/// The patch that makes an object ready at this generation.
pub(super) fn ready(generation: u64) -> Value {
    json!({"status": {
        "observedGeneration": generation,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Ready"}],
    }})
}

/// The patch that marks an object as being deleted.
pub(super) fn deletion() -> Value {
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
                "mesh.openkcm.io/tenant-uid": "uid-t0",
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

pub(super) fn namespace(name: &str, marked: bool) -> Value {
    let labels = match marked {
        true => json!({"mesh.openkcm.io/created-for": "uid-t0"}),
        false => json!({}),
    };
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
}
