//! Lets a test act as a user of a fleet: Tenants, members, releases and events, by name.

use crate::Merge as _;
use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, bail};
use k8s_openapi::{
    api::{
        coordination::v1::Lease,
        core::v1::{ConfigMap, Event, Namespace, Secret},
    },
    apimachinery::pkg::apis::meta::v1::Condition,
};
use krypton_crds::{edge_cluster::EdgeCluster, tenant::Tenant};
use krypton_runtime::lease::LEASE_NAME as MEMBER_LEASE;
use krypton_types::names::{self, EPOCH_CONFIG_MAP, HUB_LEASE};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    chart_repository::ChartRepository,
    cluster::Cluster,
    mode::Mode,
    wait::{eventually, wait_until_gone},
};

/// Namespace of the hub and its kubeconfig Secrets.
pub const HUB_NAMESPACE: &str = "default";
/// Namespace of Krypton's own objects on a member.
pub const SYSTEM_NAMESPACE: &str = "krypton-system";

/// Type, status and reason of a condition.
pub type ExpectedCondition<'a> = (&'a str, &'a str, &'a str);

/// Condition of a Tenant that is ready on all its members.
pub const ALL_READY: ExpectedCondition<'static> = ("Ready", "True", "AllClustersReady");
/// Condition of a member whose source is readable.
pub const RESOLVED: ExpectedCondition<'static> = ("TargetClusterResolved", "True", "Resolved");
/// Condition of a member whose API server responds.
pub const CONNECTED: ExpectedCondition<'static> = ("Connected", "True", "Connected");
/// Condition of a member that is reconciled.
pub const HEALTHY: ExpectedCondition<'static> = ("Healthy", "True", "Reconciling");

/// A values file that the hub follows.
#[derive(Debug)]
pub struct ValuesFile {
    folder: TempDir,
}

impl ValuesFile {
    pub fn new(yaml: &str) -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-values-").context("creating a folder")?;
        let file = Self { folder };
        file.write(yaml)?;
        Ok(file)
    }

    /// Replaces the content atomically, like the mount of a ConfigMap.
    pub fn write(&self, yaml: &str) -> Result<()> {
        let next = self.folder.path().join("next.yaml");
        fs::write(&next, yaml).context("writing values")?;
        fs::rename(next, self.path()).context("replacing the values")
    }

    pub fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("values.yaml")
    }
}

/// Returns the hub's flags for a chart of `repository`, with short back-offs.
pub fn chart_flags(repository: &ChartRepository, chart: &str, version: &str) -> Vec<String> {
    chart_flags_at(&repository.url(), chart, version)
}

/// Like `chart_flags`, for a repository at this URL.
pub fn chart_flags_at(url: &str, chart: &str, version: &str) -> Vec<String> {
    let flags = [
        ("chart-repo", url),
        ("chart-name", chart),
        ("chart-version", version),
        ("chart-install-crds", "false"),
        ("retry-max", "5s"),
    ];
    flags
        .map(|(flag, value)| format!("--{flag}={value}"))
        .into()
}

pub fn values_flag(values: &ValuesFile) -> String {
    format!("--chart-values-file={}", values.path().display())
}

/// A user of one cluster. Tenants are in the user's namespace: the hub's, or the one of `in_namespace`.
#[derive(Clone)]
pub struct FleetClient {
    pub client: Client,
    cluster: String,
    namespace: String,
}

impl std::fmt::Debug for FleetClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FleetClient")
            .field("cluster", &self.cluster)
            .finish_non_exhaustive()
    }
}

impl FleetClient {
    pub fn new(cluster: &Cluster) -> Self {
        Self {
            client: cluster.client(),
            cluster: cluster.name().to_owned(),
            namespace: HUB_NAMESPACE.to_owned(),
        }
    }

    /// Returns a client for Tenants in another namespace.
    #[must_use]
    pub fn in_namespace(&self, namespace: &str) -> Self {
        let namespace = namespace.to_owned();
        Self {
            namespace,
            ..self.clone()
        }
    }

    pub fn tenants(&self) -> Api<Tenant> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn members(&self) -> Api<EdgeCluster> {
        Api::all(self.client.clone())
    }

    /// Creates a Tenant without a spec, and waits until it is ready.
    pub async fn install(&self, name: &str) -> Result<Tenant> {
        self.create(name, json!({})).await?;
        self.wait_ready(name).await
    }

    /// Creates these Tenants without a spec, and waits until all are ready.
    pub async fn install_all(&self, names: &[&str]) -> Result<()> {
        for name in names {
            self.create(name, json!({})).await?;
        }
        for name in names {
            self.wait_ready(name).await?;
        }
        Ok(())
    }

    /// Waits until the Tenant is ready on all its members.
    pub async fn wait_ready(&self, name: &str) -> Result<Tenant> {
        self.wait_for(name, &[ALL_READY]).await
    }

    /// Deletes the Tenant, and waits until it is gone.
    pub async fn remove(&self, name: &str) -> Result<()> {
        self.delete(name).await?;
        self.wait_gone(name).await
    }

    /// Creates a Tenant, as soon as the cluster serves the CRD.
    pub async fn create(&self, name: &str, spec: Value) -> Result<Tenant> {
        self.create_annotated(name, spec, &[]).await
    }

    /// Like `create`, with annotations.
    pub async fn create_annotated(
        &self,
        name: &str,
        spec: Value,
        annotations: &[(&str, &str)],
    ) -> Result<Tenant> {
        let mut tenant = Tenant::new(name, serde_json::from_value(spec)?);
        let annotations = annotations
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        tenant.metadata.annotations = Some(annotations.collect());
        let api = self.tenants();
        let what = format!("Tenant {} to be admitted", self.describe_tenant(name));
        eventually(&what, async || {
            Ok(Some(api.create(&PostParams::default(), &tenant).await?))
        })
        .await
    }

    /// Deletes the Tenant, without waiting until it is gone.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.tenants()
            .delete(name, &DeleteParams::default())
            .await?;
        Ok(())
    }

    pub async fn annotate(&self, name: &str, key: &str, value: &str) -> Result<()> {
        let patch = json!({"metadata": {"annotations": {key: value}}});
        self.tenants().merge(name, &patch).await?;
        Ok(())
    }

    /// Waits until the Tenant has these conditions, observed at its current generation.
    pub async fn wait_for(&self, name: &str, expected: &[ExpectedCondition<'_>]) -> Result<Tenant> {
        let api = self.tenants();
        let what = format!("Tenant {} to show {expected:?}", self.describe_tenant(name));
        eventually(&what, async || {
            let tenant = api.get(name).await?;
            let status = tenant.status.clone().unwrap_or_default();
            let current = status.observed_generation == tenant.metadata.generation;
            if !current || !all_match(&status.conditions, expected) {
                bail!("{}", describe(&status.conditions));
            }
            Ok(Some(tenant))
        })
        .await
    }

    /// Waits until a Tenant's condition of this type is as expected, and returns its message.
    pub async fn wait_for_condition(
        &self,
        name: &str,
        type_: &str,
        is_expected: impl Fn(&Condition) -> bool,
    ) -> Result<String> {
        let api = self.tenants();
        let what = format!("{type_} of Tenant {}", self.describe_tenant(name));
        eventually(&what, async || {
            let status = api.get(name).await?.status.unwrap_or_default();
            match condition(&status.conditions, type_) {
                Some(found) if is_expected(found) => Ok(Some(found.message.clone())),
                found => bail!("{found:?}"),
            }
        })
        .await
    }

    /// Like `wait_for`. Returns the message of the first condition.
    pub async fn condition_message(
        &self,
        name: &str,
        expected: &[ExpectedCondition<'_>],
    ) -> Result<String> {
        let tenant = self.wait_for(name, expected).await?;
        first_condition_message(&tenant.status.unwrap_or_default().conditions, expected)
    }

    /// Waits until the Tenant is gone.
    pub async fn wait_gone(&self, name: &str) -> Result<()> {
        let api = self.tenants();
        let what = format!("Tenant {} to be gone", self.describe_tenant(name));
        eventually(&what, async || match api.get_opt(name).await? {
            None => Ok(Some(())),
            Some(tenant) => {
                let conditions = tenant.status.unwrap_or_default().conditions;
                bail!(
                    "finalizers {:?}; {}",
                    tenant.metadata.finalizers,
                    describe(&conditions)
                )
            }
        })
        .await
    }

    /// Returns the revisions of a release and their status, oldest first.
    pub async fn revisions(&self, namespace: &str, release: &str) -> Result<Vec<(u32, String)>> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), namespace);
        let params = ListParams::default().labels(&format!("owner=helm,name={release}"));
        let listed = secrets.list_metadata(&params).await?;
        let mut revisions = Vec::new();
        for secret in listed.items {
            let label = |name: &str| secret.labels().get(name).cloned();
            let number = label("version").context("a revision without a number")?;
            revisions.push((number.parse()?, label("status").unwrap_or_default()));
        }
        revisions.sort();
        Ok(revisions)
    }

    /// Waits until the newest revision has this number and is deployed.
    pub async fn wait_deployed(&self, namespace: &str, release: &str, number: u32) -> Result<()> {
        self.wait_for_revision(namespace, release, number, "deployed")
            .await
    }

    /// Waits until the newest revision has this number and this status.
    pub async fn wait_for_revision(
        &self,
        namespace: &str,
        release: &str,
        number: u32,
        status: &str,
    ) -> Result<()> {
        let what = format!(
            "revision {number} of {release} on {} to be {status}",
            self.cluster
        );
        eventually(&what, async || {
            let revisions = self.revisions(namespace, release).await?;
            match revisions.last() {
                Some((newest, current_status)) if *newest == number && current_status == status => {
                    Ok(Some(()))
                }
                _ => bail!("{revisions:?}"),
            }
        })
        .await
    }

    /// Returns all release Secrets of the cluster with their resourceVersions, which a no-op reconcile must not change.
    pub async fn releases(&self) -> Result<BTreeMap<String, String>> {
        let secrets: Api<Secret> = Api::all(self.client.clone());
        let listed = secrets
            .list_metadata(&ListParams::default().labels("owner=helm"))
            .await?;
        let version = |object: &ObjectMeta| object.resource_version.clone().unwrap_or_default();
        Ok(listed
            .items
            .iter()
            .map(|secret| (secret.name_any(), version(&secret.metadata)))
            .collect())
    }

    /// Returns the number of events of a Tenant by reason.
    pub async fn events(&self, name: &str) -> Result<BTreeMap<String, i32>> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = ListParams::default().fields(&format!(
            "involvedObject.kind=Tenant,involvedObject.name={name}"
        ));
        let mut counts = BTreeMap::new();
        for event in events.list(&params).await?.items {
            *counts.entry(event.reason.unwrap_or_default()).or_default() +=
                event.count.unwrap_or(1);
        }
        Ok(counts)
    }

    /// Waits for an event with this reason, and returns its message.
    pub async fn event_message(&self, name: &str, reason: &str) -> Result<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let params = ListParams::default().fields(&format!("involvedObject.name={name}"));
        let what = format!("event {reason} of {}", self.describe_tenant(name));
        eventually(&what, async || {
            let all = events.list(&params).await?.items;
            match all
                .iter()
                .find(|event| event.reason.as_deref() == Some(reason))
            {
                Some(event) => Ok(Some(event.message.clone().unwrap_or_default())),
                None => bail!(
                    "{:?}",
                    all.iter().map(|event| &event.reason).collect::<Vec<_>>()
                ),
            }
        })
        .await
    }

    pub async fn namespace(&self, name: &str) -> Result<Option<Namespace>> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        Ok(namespaces.get_opt(name).await?)
    }

    /// Waits until the namespace is gone.
    pub async fn wait_for_namespace_deletion(&self, name: &str) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        wait_until_gone(&namespaces, name).await
    }

    /// Makes a cluster a member: writes its kubeconfig into a Secret with the discovery label. Replaces an existing
    /// Secret.
    pub async fn add_member(&self, name: &str, kubeconfig: &str) -> Result<()> {
        let secret = json!({
            "metadata": {"labels": {names::DISCOVERY_LABEL: "true"}},
            "stringData": {names::KUBECONFIG_KEY: kubeconfig},
        });
        self.apply_secret(name, secret).await?;
        self.bind_member(name).await
    }

    /// Sets the Secret as the source of a member that joined with an agent and has no source.
    async fn bind_member(&self, name: &str) -> Result<()> {
        let members = self.members();
        // The CRD doesn't exist before the hub's first start.
        let Ok(Some(member)) = members.get_opt(name).await else {
            return Ok(());
        };
        if member.spec.source_ref.is_none() {
            let source = json!({"kind": "Secret", "namespace": self.namespace, "name": name});
            self.patch_member(name, json!({"sourceRef": source}))
                .await?;
        }
        Ok(())
    }

    /// Accepts a member whose source is outside the hub's namespace.
    pub async fn accept_member(&self, name: &str) -> Result<()> {
        let not_accepted = ("TargetClusterResolved", "False", "NotAccepted");
        self.wait_for_member(name, &[not_accepted]).await?;
        self.patch_member(name, json!({"accepted": true})).await?;
        Ok(())
    }

    /// Changes fields in the spec of an EdgeCluster.
    pub async fn patch_member(&self, name: &str, spec: Value) -> kube::Result<EdgeCluster> {
        self.members().merge(name, &json!({"spec": spec})).await
    }

    /// Applies a Secret with these fields in the user's namespace.
    pub async fn apply_secret(&self, name: &str, fields: Value) -> Result<()> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let mut secret = fields;
        secret["apiVersion"] = json!("v1");
        secret["kind"] = json!("Secret");
        secret["metadata"]["name"] = json!(name);
        let params = PatchParams::apply("a-person").force();
        secrets.patch(name, &params, &Patch::Apply(secret)).await?;
        Ok(())
    }

    /// Waits until the ConfigMap of a release has this value `message`.
    pub async fn wait_for_message(
        &self,
        namespace: &str,
        release: &str,
        expected: &str,
    ) -> Result<()> {
        let what = format!("{namespace}/{release} to have the message {expected:?}");
        eventually(&what, async || {
            match self.message(namespace, release).await? {
                Some(message) if message == expected => Ok(Some(())),
                other => bail!("{other:?}"),
            }
        })
        .await
    }

    /// Returns the value `message` in the ConfigMap of a release.
    pub async fn message(&self, namespace: &str, release: &str) -> Result<Option<String>> {
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), namespace);
        let data = maps.get(release).await?.data.unwrap_or_default();
        Ok(data.get("message").cloned())
    }

    /// Sets or removes the discovery label of a member's Secret.
    pub async fn label_member(&self, name: &str, labelled: bool) -> Result<()> {
        let value = if labelled { json!("true") } else { Value::Null };
        let patch = json!({"metadata": {"labels": {names::DISCOVERY_LABEL: value}}});
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), HUB_NAMESPACE);
        secrets.merge(name, &patch).await?;
        Ok(())
    }

    /// Waits until the EdgeCluster has these conditions.
    pub async fn wait_for_member(
        &self,
        name: &str,
        expected: &[ExpectedCondition<'_>],
    ) -> Result<EdgeCluster> {
        let members = self.members();
        let what = format!("EdgeCluster {name} to show {expected:?}");
        eventually(&what, async || {
            let member = members.get(name).await?;
            let conditions = member.status.clone().unwrap_or_default().conditions;
            if !all_match(&conditions, expected) {
                bail!("{}", describe(&conditions));
            }
            Ok(Some(member))
        })
        .await
    }

    /// Like `wait_for_member`. Returns the message of the first condition.
    pub async fn member_condition_message(
        &self,
        name: &str,
        expected: &[ExpectedCondition<'_>],
    ) -> Result<String> {
        let member = self.wait_for_member(name, expected).await?;
        first_condition_message(&member.status.unwrap_or_default().conditions, expected)
    }

    /// Waits until the EdgeCluster's status has this mode.
    pub async fn wait_for_mode(&self, name: &str, mode: Mode) -> Result<()> {
        let members = self.members();
        let what = format!("EdgeCluster {name} to have mode {mode:?}");
        eventually(&what, async || {
            let status = members.get(name).await?.status.unwrap_or_default();
            if status.mode != Some(mode.in_status()) {
                bail!("{:?}; {}", status.mode, describe(&status.conditions));
            }
            Ok(Some(()))
        })
        .await
    }

    /// Waits until the Lease has a holder other than `before`, and returns the holder.
    pub async fn wait_for_new_holder(&self, previous: &str) -> Result<String> {
        let what = format!(
            "the Lease of {} to have a holder other than {previous:?}",
            self.cluster
        );
        eventually(&what, async || match self.holder().await? {
            holder if !holder.is_empty() && holder != previous => Ok(Some(holder)),
            holder => bail!("it is held by {holder:?}"),
        })
        .await
    }

    /// Returns the holder of the cluster's Lease, or an empty string if it is released.
    pub async fn holder(&self) -> Result<String> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), SYSTEM_NAMESPACE);
        let spec = leases.get(MEMBER_LEASE).await?.spec.unwrap_or_default();
        Ok(spec.holder_identity.unwrap_or_default())
    }

    /// Waits until the holder has renewed its Lease, which shows that time has passed and the holder is alive.
    pub async fn wait_for_renewal(&self) -> Result<()> {
        self.wait_for_renewal_of(SYSTEM_NAMESPACE, MEMBER_LEASE)
            .await
    }

    /// Waits until the leading hub has renewed its Lease on home.
    pub async fn wait_for_hub_renewal(&self) -> Result<()> {
        self.wait_for_renewal_of(HUB_NAMESPACE, HUB_LEASE).await
    }

    async fn wait_for_renewal_of(&self, namespace: &str, name: &str) -> Result<()> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), namespace);
        let read_renew_time = async || {
            let spec = leases.get(name).await?.spec.unwrap_or_default();
            Ok::<_, anyhow::Error>(spec.renew_time.map(|time| time.0))
        };
        let previous = read_renew_time().await?;
        let what = format!("Lease {name} of {} to be renewed", self.cluster);
        eventually(&what, async || {
            Ok((read_renew_time().await? != previous).then_some(()))
        })
        .await
    }

    /// Returns the epoch of the leading hub on home.
    pub async fn hub_epoch(&self) -> Result<u64> {
        let config_maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), HUB_NAMESPACE);
        let config_map = config_maps
            .get(EPOCH_CONFIG_MAP)
            .await
            .context("reading the epoch")?;
        let epoch = config_map.data.and_then(|mut data| data.remove("epoch"));
        let epoch = epoch.context("the epoch is missing")?;
        epoch
            .parse()
            .with_context(|| format!("invalid epoch {epoch}"))
    }

    /// Returns namespace, name and cluster of a Tenant for a message.
    fn describe_tenant(&self, name: &str) -> String {
        format!("{}/{name} on {}", self.namespace, self.cluster)
    }
}

/// Returns the condition of this type.
pub fn condition<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

fn first_condition_message(
    conditions: &[Condition],
    expected: &[ExpectedCondition<'_>],
) -> Result<String> {
    let first = expected.first().context("no condition is expected")?;
    let found = condition(conditions, first.0).context("the condition is missing")?;
    Ok(found.message.clone())
}

fn all_match(conditions: &[Condition], expected: &[ExpectedCondition<'_>]) -> bool {
    expected.iter().all(|(type_, status, reason)| {
        condition(conditions, type_)
            .is_some_and(|condition| condition.status == *status && condition.reason == *reason)
    })
}

fn describe(conditions: &[Condition]) -> String {
    let lines = conditions.iter().map(|condition| {
        let Condition {
            type_,
            status,
            reason,
            message,
            ..
        } = condition;
        format!("{type_}={status} {reason} ({message})")
    });
    lines.collect::<Vec<_>>().join("; ")
}

/// Waits until no Helm process of a dead agent or hub with this `folder` is left.
pub async fn wait_for_helm_exit(folder: &Path) -> Result<()> {
    let check = async || match helm_processes(folder) {
        processes if processes.is_empty() => Ok(Some(())),
        processes => bail!("{processes:?}"),
    };
    eventually("helm to end with its supervisor", check).await
}

/// Returns the command lines of running Helm processes whose arguments name a path in `folder`.
pub fn helm_processes(folder: &Path) -> Vec<String> {
    helm_runs(folder).map(|(_, line)| line).collect()
}

/// Kills the running Helm processes whose arguments name a path in `folder`, without their supervisors. Returns their
/// number.
pub fn kill_helm(folder: &Path) -> Result<usize> {
    let mut killed = 0;
    for (pid, line) in helm_runs(folder) {
        if !line.contains(" helm-run ") {
            kill_process(pid, Signal::KILL).with_context(|| format!("killing {line}"))?;
            killed += 1;
        }
    }
    Ok(killed)
}

fn helm_runs(folder: &Path) -> impl Iterator<Item = (Pid, String)> {
    let folder = folder.display().to_string();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(move |entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let line = fs::read(entry.path().join("cmdline")).ok()?;
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let is_helm_run = ["upgrade --install", "install --replace", "uninstall --wait"]
            .iter()
            .any(|verb| line.contains(verb));
        (is_helm_run && line.contains(&folder)).then_some((Pid::from_raw(pid)?, line))
    })
}
