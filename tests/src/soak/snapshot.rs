//! Reads the state of all clusters directly from their API servers, without the faulty connections and without Krypton.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Namespace, Secret, Service},
    },
    apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta},
};
use krypton_crds::{edge_cluster::EdgeCluster, tenant::Tenant};
use krypton_tests::release_payload;
use kube::{Api, Client, ResourceExt, api::ListParams};
use serde_json::Value;

use super::whom::{Edge, HubId, Object};

pub(crate) const FINGERPRINT_LABEL: &str = "mesh.openkcm.io/fingerprint";
pub(crate) const CREATOR_LABEL: &str = "mesh.openkcm.io/created-for";
/// Label of namespaces that the soak test creates itself. In a workspace, the name of a foreign object marks it
/// instead.
pub(crate) const FOREIGN_LABEL: &str = "soak.example.org/foreign";
pub(crate) const RELEASE_ANNOTATION: &str = "meta.helm.sh/release-name";

/// (namespace, name)
pub(crate) type ObjectKey = (String, String);

/// The fields of a Tenant that the soak test checks.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct TenantSeen {
    pub(crate) uid: String,
    pub(crate) deleting: bool,
    pub(crate) finalizers: Vec<String>,
    pub(crate) workspace: String,
    pub(crate) generation: i64,
    pub(crate) observed: i64,
    pub(crate) phase: String,
    pub(crate) chart: String,
    /// Status, reason and message by type.
    pub(crate) conditions: BTreeMap<String, (String, String, String)>,
}

impl TenantSeen {
    pub(crate) fn from_tenant(tenant: &Tenant) -> Self {
        let status = tenant.status.clone().unwrap_or_default();
        Self {
            uid: tenant.uid().unwrap_or_default(),
            deleting: tenant.metadata.deletion_timestamp.is_some(),
            finalizers: tenant.finalizers().to_vec(),
            workspace: tenant.workspace().to_owned(),
            generation: tenant.metadata.generation.unwrap_or_default(),
            observed: status.observed_generation.unwrap_or_default(),
            phase: status.phase.unwrap_or_default(),
            chart: status.last_applied_chart.unwrap_or_default(),
            conditions: conditions(&status.conditions),
        }
    }

    /// Formats all conditions for a reader.
    pub(crate) fn describe(&self) -> String {
        let lines = self
            .conditions
            .iter()
            .map(|(kind, (status, reason, message))| {
                format!("{kind}={status} {reason} ({message})")
            });
        lines.collect::<Vec<_>>().join("; ")
    }
}

fn conditions(all: &[Condition]) -> BTreeMap<String, (String, String, String)> {
    all.iter()
        .map(|condition| {
            let value = (
                condition.status.clone(),
                condition.reason.clone(),
                condition.message.clone(),
            );
            (condition.type_.clone(), value)
        })
        .collect()
}

/// One revision of a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RevisionSeen {
    pub(crate) number: u32,
    /// From the label.
    pub(crate) status: String,
    pub(crate) fingerprint: String,
    /// Status and chart version from the payload, or the reason why the payload is invalid.
    pub(crate) content: Result<(String, String), String>,
}

/// An object that Helm created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ObjectSeen {
    pub(crate) uid: String,
    /// From the annotation.
    pub(crate) release: String,
    /// The content that comes from the chart: the data of a ConfigMap, the replicas and version of a Deployment, the
    /// ports of a Service.
    pub(crate) content: BTreeMap<String, String>,
}

/// A namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NamespaceSeen {
    pub(crate) terminating: bool,
    /// Whether Krypton created the namespace.
    pub(crate) created_by_krypton: bool,
}

/// State of one edge cluster.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct EdgeSeen {
    pub(crate) tenants: BTreeMap<String, TenantSeen>,
    /// Revisions by namespace and release, oldest first.
    pub(crate) releases: BTreeMap<ObjectKey, Vec<RevisionSeen>>,
    pub(crate) objects: BTreeMap<(Object, ObjectKey), ObjectSeen>,
    pub(crate) namespaces: BTreeMap<String, NamespaceSeen>,
    /// Foreign objects, which Krypton must not change, as JSON by kind and name.
    pub(crate) foreign: BTreeMap<String, String>,
}

/// State of all clusters.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Snapshot {
    pub(crate) edges: BTreeMap<Edge, EdgeSeen>,
    /// Tenants on the home cluster.
    pub(crate) home: BTreeMap<String, TenantSeen>,
    /// Conditions of EdgeClusters.
    pub(crate) members: BTreeMap<String, BTreeMap<String, (String, String, String)>>,
    /// For each hub that responds, whether it reports itself as the leader.
    pub(crate) hubs: BTreeMap<HubId, bool>,
    /// Holder of the leader election Lease.
    pub(crate) holder: String,
}

impl EdgeSeen {
    /// Reads the state of one edge cluster.
    pub(crate) async fn read(client: &Client) -> Result<Self> {
        let all = ListParams::default();
        let helm_releases = ListParams::default().labels("owner=helm");
        let (tenants, secrets, maps, services, deployments, namespaces) = tokio::try_join!(
            list::<Tenant>(client, &all),
            list::<Secret>(client, &helm_releases),
            list::<ConfigMap>(client, &all),
            list::<Service>(client, &all),
            list::<Deployment>(client, &all),
            list::<Namespace>(client, &all),
        )?;
        let mut edge = Self::default();
        for tenant in tenants {
            edge.tenants
                .insert(tenant.name_any(), TenantSeen::from_tenant(&tenant));
        }
        for secret in secrets {
            edge.add_if_foreign("Secret", &secret.metadata, &secret);
            edge.add_revision(&secret);
        }
        edge.releases
            .values_mut()
            .for_each(|revisions| revisions.sort_by_key(|revision| revision.number));
        for map in maps {
            edge.add_if_foreign("ConfigMap", &map.metadata, &map);
            let content = map.data.clone().unwrap_or_default();
            edge.add_object(Object::ConfigMap, &map.metadata, content);
        }
        for service in services {
            edge.add_if_foreign("Service", &service.metadata, &service);
            let ports = service.spec.clone().unwrap_or_default().ports;
            let ports: Vec<_> = ports
                .into_iter()
                .flatten()
                .map(|port| (port.port, port.target_port))
                .collect();
            let content = [("ports".to_owned(), format!("{ports:?}"))].into();
            edge.add_object(Object::Service, &service.metadata, content);
        }
        for deployment in deployments {
            edge.add_foreign_deployment(&deployment);
            let spec = deployment.spec.clone().unwrap_or_default();
            let template = spec.template.metadata.unwrap_or_default();
            let version = template
                .annotations
                .unwrap_or_default()
                .remove("chart-version");
            let content = [
                ("replicas".to_owned(), format!("{:?}", spec.replicas)),
                ("version".to_owned(), version.unwrap_or_default()),
            ];
            edge.add_object(Object::Deployment, &deployment.metadata, content.into());
        }
        for namespace in namespaces {
            let state = NamespaceSeen {
                terminating: namespace.metadata.deletion_timestamp.is_some(),
                created_by_krypton: namespace.labels().contains_key(CREATOR_LABEL),
            };
            // The status of a new namespace changes on its own.
            let foreign = namespace.labels().contains_key(FOREIGN_LABEL);
            if foreign {
                edge.add_foreign("Namespace", &namespace.metadata, &namespace);
            }
            edge.namespaces.insert(namespace.name_any(), state);
        }
        Ok(edge)
    }

    fn add_revision(&mut self, secret: &Secret) {
        let label = |name: &str| secret.labels().get(name).cloned().unwrap_or_default();
        let object_key = (secret.namespace().unwrap_or_default(), label("name"));
        let revision = RevisionSeen {
            number: label("version").parse().unwrap_or_default(),
            status: label("status"),
            fingerprint: label(FINGERPRINT_LABEL),
            content: decode_content(secret).map_err(|error| format!("{error:#}")),
        };
        self.releases.entry(object_key).or_default().push(revision);
    }

    fn add_object(
        &mut self,
        kind: Object,
        metadata: &ObjectMeta,
        content: BTreeMap<String, String>,
    ) {
        let annotations = metadata.annotations.clone().unwrap_or_default();
        let Some(release) = annotations.get(RELEASE_ANNOTATION).cloned() else {
            return;
        };
        let uid = metadata.uid.clone().unwrap_or_default();
        let object = ObjectSeen {
            uid,
            release,
            content,
        };
        self.objects.insert((kind, object_key(metadata)), object);
    }

    /// Stores an object of the soak test, or of a foreign release.
    fn add_if_foreign(
        &mut self,
        kind: &str,
        metadata: &ObjectMeta,
        object: &impl serde::Serialize,
    ) {
        if is_foreign(metadata) {
            self.add_foreign(kind, metadata, object);
        }
    }

    fn add_foreign(&mut self, kind: &str, metadata: &ObjectMeta, object: &impl serde::Serialize) {
        let (namespace, name) = object_key(metadata);
        let json = serde_json::to_string(object).unwrap_or_default();
        self.foreign
            .insert(format!("{kind} {namespace}/{name}"), json);
    }

    /// Omits the status and the revision, which belong to controllers.
    fn add_foreign_deployment(&mut self, deployment: &Deployment) {
        if is_foreign(&deployment.metadata) {
            let spec = (&deployment.metadata.uid, &deployment.spec);
            self.add_foreign("Deployment", &deployment.metadata, &spec);
        }
    }
}

/// The names of foreign objects and releases start with `foreign-`. The Secrets of foreign releases have Helm's prefix
/// before it.
fn is_foreign(metadata: &ObjectMeta) -> bool {
    let name = metadata.name.clone().unwrap_or_default();
    name.starts_with("foreign-") || name.starts_with("sh.helm.release.v1.foreign-")
}

pub(crate) fn object_key(metadata: &ObjectMeta) -> ObjectKey {
    let [namespace, name] = [&metadata.namespace, &metadata.name].map(Clone::clone);
    (namespace.unwrap_or_default(), name.unwrap_or_default())
}

/// Returns the status and the chart's version.
fn decode_content(secret: &Secret) -> Result<(String, String)> {
    let release = release_payload::read(secret)?;
    let text = |pointer: &str| {
        let text = release.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    Ok((text("/info/status"), text("/chart/metadata/version")))
}

/// Reads the Tenants and members of the home cluster.
pub(crate) async fn home(client: &Client, snapshot: &mut Snapshot) -> Result<()> {
    let all = ListParams::default();
    let (tenants, members) = tokio::try_join!(
        list::<Tenant>(client, &all),
        list::<EdgeCluster>(client, &all),
    )?;
    for tenant in tenants {
        snapshot
            .home
            .insert(tenant.name_any(), TenantSeen::from_tenant(&tenant));
    }
    for member in members {
        let status = member.status.clone().unwrap_or_default();
        snapshot
            .members
            .insert(member.name_any(), conditions(&status.conditions));
    }
    Ok(())
}

async fn list<K>(client: &Client, params: &ListParams) -> Result<Vec<K>>
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + 'static,
{
    let api: Api<K> = Api::all(client.clone());
    let listed = tokio::time::timeout(super::READ_DEADLINE, api.list(params)).await;
    let what = || format!("listing {}", K::plural(&()));
    Ok(listed.with_context(what)?.with_context(what)?.items)
}
