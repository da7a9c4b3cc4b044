//! Performs user actions on Tenants and other objects directly on the API servers, with retries.

use std::time::Duration;

use krypton_crds::tenant::Tenant as TenantObject;
use krypton_reconciler::backup::RECORD_LABEL;
use krypton_tests::{
    Merge as _, eventually, eventually_within, fleet::SYSTEM_NAMESPACE, release_payload,
};
use krypton_types::names;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Secret, Service},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, CustomResourceExt, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::{Value, json};

use super::{
    expected_state::ExpectedState,
    judgement::FOREIGN_FINALIZER,
    snapshot::EdgeSeen,
    stage::Site,
    whom::{Object, Tenant, Workspace},
};

const NAMESPACE: &str = "default";
/// Timeout for actions that need a release, which may not exist.
const RELEASE_DEADLINE: Duration = Duration::from_secs(20);
const SMALL_CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/small");

pub(crate) struct UserActions<'a> {
    site: &'a Site,
    home: &'a Client,
    expected_state: &'a ExpectedState,
}

impl<'a> UserActions<'a> {
    pub(crate) fn new(site: &'a Site, home: &'a Client, expected_state: &'a ExpectedState) -> Self {
        Self {
            site,
            home,
            expected_state,
        }
    }

    fn tenants(&self) -> Api<TenantObject> {
        Api::namespaced(self.site.client.clone(), NAMESPACE)
    }

    fn home_tenants(&self) -> Api<TenantObject> {
        Api::namespaced(self.home.clone(), NAMESPACE)
    }

    /// Creates the Tenant on the edge cluster, and on the home cluster, which aggregates its status.
    pub(crate) async fn create(&self, tenant: Tenant, workspace: Workspace) -> Result<()> {
        let spec = match workspace {
            Workspace::Unset => json!({}),
            workspace => json!({"workspace": workspace.namespace(tenant)}),
        };
        self.expected_state.expect(tenant, workspace);
        let object = TenantObject::new(&tenant.name(), serde_json::from_value(spec)?);
        let home_object = TenantObject::new(&tenant.name(), Default::default());
        create_tenant(&self.tenants(), &object, async || {
            self.check_crd_restored().await
        })
        .await?;
        create_tenant(&self.home_tenants(), &home_object, async || Ok(())).await
    }

    /// Returns an error while Tenants still need to be restored with their CRD. A new Tenant of the same name would
    /// conflict.
    async fn check_crd_restored(&self) -> Result<()> {
        let client = &self.site.client;
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        let secrets: Api<Secret> = Api::namespaced(client.clone(), SYSTEM_NAMESPACE);
        let crd = crds.get(TenantObject::crd_name()).await?;
        let is_deleted = crd.metadata.deletion_timestamp.is_some();
        ensure!(!is_deleted, "the CRD is being deleted");
        let records = ListParams::default().labels(RECORD_LABEL);
        let backups = secrets.list_metadata(&records).await?.items;
        ensure!(backups.is_empty(), "not all Tenants are restored");
        Ok(())
    }

    pub(crate) async fn delete(&self, tenant: Tenant) -> Result<()> {
        let Some(tenant_state) = self.expected_state.expect_deletion(tenant) else {
            bail!("{} is missing", tenant.name());
        };
        delete_tenant(&self.tenants(), &tenant.name()).await?;
        delete_tenant(&self.home_tenants(), &tenant.name()).await?;
        if tenant_state.has_foreign_finalizer {
            self.set_finalizer(tenant, false).await?;
        }
        Ok(())
    }

    pub(crate) async fn set_workspace(&self, tenant: Tenant) -> Result<()> {
        let patch = json!({"spec": {"workspace": tenant.name()}});
        self.patch(tenant, &patch).await?;
        self.expected_state.update(|expected| {
            if let Some(tenant_state) = expected.tenants.get_mut(&tenant) {
                tenant_state.workspace = Workspace::Named;
            }
        });
        Ok(())
    }

    pub(crate) async fn pause(&self, tenant: Tenant, paused: bool) -> Result<()> {
        let value = if paused { json!("true") } else { Value::Null };
        let patch = json!({"metadata": {"annotations": {names::PAUSED_ANNOTATION: value}}});
        self.patch(tenant, &patch).await
    }

    async fn patch(&self, tenant: Tenant, patch: &Value) -> Result<()> {
        let (api, name) = (self.tenants(), tenant.name());
        let what = format!("{name} to be patched");
        eventually(&what, async || {
            api.merge(&name, patch).await?;
            Ok(Some(()))
        })
        .await
    }

    /// Adds a foreign finalizer, or removes it.
    pub(crate) async fn set_finalizer(&self, tenant: Tenant, present: bool) -> Result<()> {
        let (api, name) = (self.tenants(), tenant.name());
        let what = format!("the finalizers of {name} to be changed");
        eventually(&what, async || {
            let Some(current) = api.get_opt(&name).await? else {
                return Ok((!present).then_some(()));
            };
            ensure!(
                !present || current.metadata.deletion_timestamp.is_none(),
                "it is being deleted"
            );
            let mut finalizers = current.finalizers().to_vec();
            finalizers.retain(|finalizer| finalizer != FOREIGN_FINALIZER);
            if present {
                finalizers.push(FOREIGN_FINALIZER.to_owned());
            }
            let version = current.resource_version();
            let patch = json!({"metadata": {"finalizers": finalizers, "resourceVersion": version}});
            api.merge(&name, &patch).await?;
            Ok(Some(()))
        })
        .await?;
        self.expected_state.set_foreign_finalizer(tenant, present);
        Ok(())
    }

    /// Deletes the Tenant CRD together with all Tenants. Removes foreign finalizers first, because they would block the
    /// deletion.
    pub(crate) async fn delete_crd(&self) -> Result<()> {
        let expected = self.expected_state.expected();
        let edge_tenants = expected
            .tenants
            .iter()
            .filter(|(tenant, _)| tenant.edge() == self.site.edge);
        for (tenant, tenant_state) in edge_tenants {
            if tenant_state.has_foreign_finalizer {
                self.set_finalizer(*tenant, false).await?;
            }
        }
        let crds: Api<CustomResourceDefinition> = Api::all(self.site.client.clone());
        let name = TenantObject::crd_name();
        eventually("the CRD to be deleted", async || {
            crds.delete(name, &DeleteParams::default()).await?;
            Ok(Some(()))
        })
        .await
    }

    /// Deletes the Secret of the newest revision, or the Secrets of all revisions.
    pub(crate) async fn delete_release(&self, tenant: Tenant, all: bool) -> Result<()> {
        self.retry_with_revisions(tenant, async |secrets, api| {
            let params = DeleteParams::default();
            let count = if all { secrets.len() } else { 1 };
            for secret in secrets.iter().rev().take(count) {
                api.delete(&secret.name_any(), &params).await?;
            }
            Ok(())
        })
        .await
    }

    pub(crate) async fn damage_release(&self, tenant: Tenant) -> Result<()> {
        self.retry_with_revisions(tenant, async |secrets, api| {
            let newest = secrets.last().context("no revision")?;
            // Valid base64, but not valid gzip.
            let data = ByteString(b"H4sIAAAAAAAA/2RhbWFnZWQ=".to_vec());
            api.merge(&newest.name_any(), &json!({"data": {"release": data}}))
                .await?;
            Ok(())
        })
        .await
    }

    /// Sets the status in the payload and in the label.
    pub(crate) async fn mark_release(&self, tenant: Tenant, mark: &str) -> Result<()> {
        self.retry_with_revisions(tenant, async |secrets, api| {
            let mut newest = secrets.last().context("no revision")?.clone();
            release_payload::rewrite(&mut newest, &|release: &mut Value| {
                release["info"]["status"] = json!(mark);
            })?;
            let status = ("status".to_owned(), mark.to_owned());
            newest.labels_mut().extend([status]);
            api.replace(&newest.name_any(), &PostParams::default(), &newest)
                .await?;
            Ok(())
        })
        .await
    }

    fn namespace_of(&self, tenant: Tenant) -> Result<String> {
        let tenant_state = self.expected_state.expected_tenant(tenant);
        let tenant_state = tenant_state.context("not a Tenant")?;
        Ok(tenant_state.workspace.namespace(tenant))
    }

    async fn retry_with_revisions(
        &self,
        tenant: Tenant,
        mut action: impl AsyncFnMut(&[Secret], &Api<Secret>) -> Result<()>,
    ) -> Result<()> {
        let namespace = self.namespace_of(tenant)?;
        let api: Api<Secret> = Api::namespaced(self.site.client.clone(), &namespace);
        let release = tenant.release();
        let params = ListParams::default().labels(&format!("owner=helm,name={release}"));
        let what = format!("revisions of {release}");
        eventually_within(&what, RELEASE_DEADLINE, async || {
            let mut secrets = api.list(&params).await?.items;
            let number = |secret: &Secret| -> u32 {
                let label = secret.labels().get("version");
                label.and_then(|text| text.parse().ok()).unwrap_or_default()
            };
            ensure!(!secrets.is_empty(), "there are no revisions");
            secrets.sort_by_key(number);
            action(&secrets, &api).await.map(Some)
        })
        .await
    }

    /// Creates a foreign ConfigMap in the workspace.
    pub(crate) async fn create_foreign_object(&self, tenant: Tenant, number: u32) -> Result<()> {
        let namespace = self.namespace_of(tenant)?;
        let api: Api<ConfigMap> = Api::namespaced(self.site.client.clone(), &namespace);
        let name = format!("foreign-{number}");
        let map = json!({"metadata": {"name": name}, "data": {"whose": "not Krypton's"}});
        let map: ConfigMap = serde_json::from_value(map)?;
        let what = format!("{name} to be in {namespace}");
        let created = eventually(&what, async || match api.get_opt(&name).await? {
            Some(created) => Ok(Some(created)),
            None => Ok(Some(api.create(&PostParams::default(), &map).await?)),
        })
        .await?;
        let key = (self.site.edge, format!("ConfigMap {namespace}/{name}"));
        let content = serde_json::to_string(&created)?;
        self.expected_state.update(|expected| {
            expected.foreign.insert(key, content);
        });
        Ok(())
    }

    /// Installs a foreign release in the workspace.
    pub(crate) async fn install_foreign_release(&self, tenant: Tenant, number: u32) -> Result<()> {
        let namespace = self.namespace_of(tenant)?;
        let name = format!("foreign-{number}");
        let cluster = &self.site.cluster;
        eventually(&format!("{name} to be installed"), async || {
            let install = ["upgrade", "--install", &name, SMALL_CHART, "-n", &namespace];
            let values = ["--set", "replicaCount=0"];
            let installed = cluster.helm(install.into_iter().chain(values)).await;
            if let Err(error) = installed {
                let undo = ["uninstall", &name, "--ignore-not-found", "-n", &namespace];
                drop(cluster.helm(undo).await);
                return Err(error);
            }
            Ok(Some(()))
        })
        .await?;
        let foreign = eventually("the release's objects", async || {
            let edge_state = EdgeSeen::read(&self.site.client).await?;
            let key_part = format!("{namespace}/");
            let mut foreign_objects = edge_state.foreign;
            foreign_objects.retain(|what, _| what.contains(&key_part) && what.contains(&name));
            ensure!(foreign_objects.len() >= 4, "{:?}", foreign_objects.keys());
            Ok(Some(foreign_objects))
        })
        .await?;
        let edge = self.site.edge;
        self.expected_state.update(|expected| {
            let foreign = foreign.into_iter();
            let keyed = foreign.map(|(what, content)| ((edge, what), content));
            expected.foreign.extend(keyed);
        });
        Ok(())
    }

    /// Edits an object of the chart, or deletes it.
    pub(crate) async fn drift(&self, tenant: Tenant, object: Object, gone: bool) -> Result<()> {
        let client = self.site.client.clone();
        let namespace = self.namespace_of(tenant)?;
        let name = tenant.release();
        match object {
            Object::ConfigMap => {
                let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
                let edit = json!({"data": {"message": "drifted"}});
                self.edit_or_delete(&api, &name, edit, gone).await
            }
            Object::Service => {
                let api: Api<Service> = Api::namespaced(client, &namespace);
                // Helm can't correct an additional port of the same name.
                let port = json!({"name": "http", "port": 80, "targetPort": 81});
                let edit = json!({"spec": {"ports": [port]}});
                self.edit_or_delete(&api, &name, edit, gone).await
            }
            Object::Deployment => {
                let api: Api<Deployment> = Api::namespaced(client, &namespace);
                let edit = json!({"spec": {"replicas": 2}});
                self.edit_or_delete(&api, &name, edit, gone).await
            }
        }
    }

    async fn edit_or_delete<K>(
        &self,
        api: &Api<K>,
        name: &str,
        edit: Value,
        delete: bool,
    ) -> Result<()>
    where
        K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    {
        let what = format!("{name} to be changed");
        eventually_within(&what, RELEASE_DEADLINE, async || {
            if !delete {
                let params = PatchParams::default();
                api.patch(name, &params, &Patch::Merge(&edit)).await?;
                return Ok(Some(()));
            }
            let uid = api.get(name).await?.uid().unwrap_or_default();
            self.expected_state.allow_deletion(&uid);
            let preconditions = Preconditions {
                uid: Some(uid),
                resource_version: None,
            };
            let params = DeleteParams::default().preconditions(preconditions);
            api.delete(name, &params).await?;
            Ok(Some(()))
        })
        .await
    }

    /// Repeats user actions that a concurrent deletion of the CRD has undone, and returns their number. Krypton
    /// restores Tenants as it last saw them, and Tenants that it hadn't seen yet are lost.
    pub(crate) async fn repeat_lost_actions(&self) -> Result<usize> {
        let (edge, api) = (self.site.edge, self.tenants());
        let mut missing = self.expected_state.expected().tenants;
        missing.retain(|tenant, _| {
            tenant.edge() == edge && !self.expected_state.is_installed(*tenant)
        });
        let repeated = eventually("all Tenants to be read", async || {
            self.check_crd_restored().await?;
            let mut repeated = 0;
            for object in api.list(&ListParams::default()).await?.items {
                let name = object.name_any();
                let tenant = name.strip_prefix("t-").and_then(|slot| slot.parse().ok());
                let tenant = Tenant(tenant.context("the name of a Tenant is unknown")?);
                missing.remove(&tenant);
                ensure!(tenant.edge() == edge, "{name} is on the wrong edge");
                let is_expected = self.expected_state.expected_tenant(tenant).is_some();
                if !is_expected && object.metadata.deletion_timestamp.is_none() {
                    api.delete(&name, &DeleteParams::default()).await?;
                    repeated += 1;
                }
                if is_expected && object.annotations().contains_key(names::PAUSED_ANNOTATION) {
                    self.pause(tenant, false).await?;
                    repeated += 1;
                }
            }
            Ok(Some(repeated))
        })
        .await?;
        for (tenant, tenant_state) in &missing {
            self.create(*tenant, tenant_state.workspace).await?;
        }
        Ok(repeated + missing.len())
    }
}

/// Creates the Tenant when no earlier one of its name is terminating.
async fn create_tenant(
    api: &Api<TenantObject>,
    object: &TenantObject,
    check: impl AsyncFn() -> Result<()>,
) -> Result<()> {
    let name = object.name_any();
    eventually(&format!("{name} to be admitted"), async || {
        check().await?;
        match api.create(&PostParams::default(), object).await {
            Ok(_) => Ok(Some(())),
            // A lost response: the object is ours unless it is terminating.
            Err(kube::Error::Api(status)) if status.code == 409 => {
                let existing = api.get(&name).await?;
                ensure!(
                    existing.metadata.deletion_timestamp.is_none(),
                    "the one before is there"
                );
                if existing.spec != object.spec {
                    // Krypton restored the earlier Tenant, because its CRD was deleted at the same time.
                    api.delete(&name, &DeleteParams::default()).await?;
                    bail!("the earlier Tenant was restored");
                }
                Ok(Some(()))
            }
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// Deletes the Tenant without waiting until it is gone.
async fn delete_tenant(api: &Api<TenantObject>, name: &str) -> Result<()> {
    eventually(&format!("{name} to be deleted"), async || {
        match api.delete(name, &DeleteParams::default()).await {
            Ok(_) => Ok(Some(())),
            Err(kube::Error::Api(status)) if status.code == 404 => {
                // A missing CRD also returns 404. When the CRD returns, `insist` repeats the deletion.
                Ok(Some(()))
            }
            Err(error) => Err(error.into()),
        }
    })
    .await
}

/// Repeats lost user actions on all edge clusters.
pub(crate) async fn repeat_lost_actions(users: [UserActions<'_>; 2]) -> Result<usize> {
    let mut repeated = 0;
    for user in users {
        repeated += user.repeat_lost_actions().await?;
    }
    Ok(repeated)
}
