//! Kills hub and agent, or fails them, once at each of their external effects. Running releases continue, and the
//! desired state is reached.
//!
//! `make test` fails each effect before it, and kills the process after it. `KRYPTON_FAILPOINTS=all` (`make
//! failpoints`) runs all variants in both modes: killed and failed, before and after. `kill` and `error` run half of
//! them.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use k8s_openapi::{
    ByteString,
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Namespace, Secret},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use krypton_crds::{
    edge_cluster::EdgeCluster,
    krypton_deployment::{DeploymentPhase, KryptonDeployment},
    tenant::Tenant,
};
use krypton_hub::{chart::values_reader::SALT_NAME, effects::EFFECTS as EFFECTS_OF_THE_HUB};
use krypton_reconciler::record::anchor::ANCHOR_NAME;
use krypton_runtime::failpoint::{EFFECTS, MOMENTS};
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Merge as _, Mode, TestResult, Walk, eventually,
    eventually_within,
    fleet::{
        ALL_READY, FleetClient, HUB_NAMESPACE, PATIENCE, SYSTEM_NAMESPACE, ValuesFile, chart_flags,
        values_flag,
    },
    held::Held,
    in_both_modes, kubectl_krypton,
    walk::EDGE,
};
use krypton_types::names::{self, MEMBERS_CONFIG_MAP};
use kube::{
    Api, CustomResourceExt, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;

const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/small");
const CRD: &str = r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.org}
spec:
  group: example.org
  scope: Namespaced
  names: {kind: Widget, plural: widgets, singular: widget}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
"#;
/// Values of cert-manager for one release, and the objects that the chart keeps.
const CERT_MANAGER: &str = r#"
{{- if eq .Release.Name "tenant-keeper-edge-1" }}
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: orders.acme.cert-manager.io, annotations: {helm.sh/resource-policy: keep}}
spec:
  group: acme.cert-manager.io
  scope: Namespaced
  names: {kind: Order, plural: orders, singular: order}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]
{{- end }}
"#;
const EXTRA: &str = r#"
{{- if .Values.extra }}
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Values.extra | quote }}}
{{- end }}
"#;
/// Effects of an agent's process, which a proxy doesn't have.
const OF_AGENTS: [&str; 10] = [
    "enrollment.edge-cluster",
    "enrollment.enroll",
    "enrollment.mark",
    "enrollment.renew",
    "hub-chart.fetch",
    "identity.create",
    "identity.keep",
    "identity.namespace",
    "join-token.redeem",
    "session.open",
];

/// The hub of a walk runs in no existing pod. `leader_label.rs` kills one after it has labelled its own.
const OF_PODS: [&str; 1] = ["lead.label:after"];

/// The agent has already created the namespace.
const OF_PROXIES: [&str; 1] = ["lease.namespace"];

/// Collects the names in `effect!("…"` from all source files below the folder.
fn placed(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            placed(&path, found);
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let calls = text.split("effect!(").chain(text.split("effect_now!("));
        let names = calls.filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next());
        found.extend(names.filter(|name| !name.contains('…')).map(str::to_owned));
    }
}

#[test]
fn effect_tables_match_failpoints_in_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let tables: [(&[&str], &[&str]); 2] = [
        (&["common", "agent/src"], &EFFECTS),
        (&["hub/src"], &EFFECTS_OF_THE_HUB),
    ];
    for (folders, table) in tables {
        let mut found = Vec::new();
        for folder in folders {
            placed(&root.join(folder), &mut found);
        }
        found.sort();
        assert_eq!(found, table, "{folders:?}");
    }
    let points = (EFFECTS.len() + EFFECTS_OF_THE_HUB.len()) * MOMENTS.len();
    assert!(points > 100, "{points}");
}

/// Returns the fault at a moment: `kill` or `error`.
type Kind = fn(&str) -> &'static str;

in_both_modes!(error_or_kill_at_any_failpoint_still_converges);

/// A proxy reaches all effects. With an agent, only the effects of an agent's process are required, unless all are
/// requested.
async fn error_or_kill_at_any_failpoint_still_converges(mode: Mode) -> TestResult {
    let which = std::env::var("KRYPTON_FAILPOINTS");
    let (kill, error) = (|_: &str| "kill", |_: &str| "error");
    let each = |moment: &str| if moment == "before" { "error" } else { "kill" };
    let walks: &[(&str, Kind)] = match which.as_deref() {
        Ok("all") => &[("*", kill), ("*", error)],
        Ok("kill") => &[("*", kill)],
        Ok("error") => &[("*", error)],
        _ if mode == Mode::Agent => &[("agents", each)],
        _ => &[("*", each)],
    };
    for (of, how) in walks {
        let rule = |point: &String| {
            let moment = point.rsplit(':').next().unwrap_or_default();
            format!("{point}={}", how(moment))
        };
        let every = *of == "*";
        let first = match every {
            true => MOMENTS.map(|moment| format!("*:{moment}")).to_vec(),
            false => points(mode, every),
        };
        let plan = first.iter().map(rule).collect::<Vec<_>>().join(",");
        let missed = Box::pin(walk(mode, every, &plan)).await?;
        // A rare effect can coincide with another process's death. Repeat it without other faults.
        if !missed.is_empty() {
            let plan = missed.iter().map(rule).collect::<Vec<_>>().join(",");
            let missed = Box::pin(walk(mode, every, &plan)).await?;
            assert!(missed.is_empty(), "not reached, {mode:?}: {missed:#?}");
        }
    }
    Ok(())
}

/// Returns all points that must be reached.
fn points(mode: Mode, every: bool) -> Vec<String> {
    let effects = EFFECTS.into_iter().chain(EFFECTS_OF_THE_HUB);
    let effects = effects.filter(|effect| match mode {
        Mode::Agent if every => !OF_PROXIES.contains(effect),
        Mode::Agent => OF_AGENTS.contains(effect),
        _ => !OF_AGENTS.contains(effect),
    });
    effects
        .flat_map(|effect| MOMENTS.map(|moment| format!("{effect}:{moment}")))
        .filter(|point| !OF_PODS.contains(&point.as_str()))
        .collect()
}

/// Plays all scenes, and returns the points that were not reached.
async fn walk(mode: Mode, every: bool, plan: &str) -> Result<Vec<String>> {
    let folder = TempDir::with_prefix("krypton-chart-")?;
    let repository = ChartRepository::start(&[chart(folder.path())?]).await?;
    let values = ValuesFile::new(&values_with("first"))?;
    let mut flags = chart_flags(&repository, "small", "~1.0");
    flags.push(values_flag(&values));
    let more = [
        "self-cluster=false",
        "chart-crds=create-replace",
        "chart-resolve-interval=1h",
        "chart-values-from=secret/fleet-values?",
        "delete-cert-manager-crds=true",
        "place-tenants=true",
        "workspace-labels=team=a",
        "drift=heal",
        "drift-interval=1s",
        "ensure-watch-crds=true",
    ];
    flags.extend(more.map(|flag| format!("--{flag}")));
    let mut walk = Walk::begin("walk", mode, plan, flags).await?;
    let place = Place::of(&walk, values);

    walk.join().await?;
    let keeper = walk.through("a first Tenant", place.first()).await?;
    // The rotation pauses in each of its phases.
    place.rotate(&[]).await?;
    walk.through("a Tenant's life", place.life()).await?;
    let region = match mode {
        Mode::Agent => json!({"name": EDGE}),
        _ => json!({"name": "x", "kubeconfigSecretName": EDGE}),
    };
    walk.through("a deployment's life", place.ordered(region))
        .await?;
    if every {
        walk.through("what is found broken", place.repair()).await?;
        walk.through("a Tenant that home places", place.placed())
            .await?;
        walk.through("an upgrade that fails", place.failed())
            .await?;
        walk.through("installations that fail", place.refused())
            .await?;
        walk.through("drift", place.drift()).await?;
        walk.through("the CRD deleted", place.restore_from_backup())
            .await?;
        place.age().await?;
        walk.kill_and_start_with("--remediation=rollback").await?;
        walk.through("what is out of date", place.renewed()).await?;
        walk.through("an upgrade that is given up", place.given_up())
            .await?;
    }
    if mode == Mode::Agent {
        walk.through("the CA rotated", place.rotated()).await?;
    }
    keeper.unharmed(&place).await?;
    walk.stop_twice().await?;
    walk.through("another start", place.is_complete("keeper"))
        .await?;
    keeper.unharmed(&place).await?;
    if mode == Mode::Agent {
        walk.through("a source of an agent's member", place.bound())
            .await?;
    }
    walk.through("the member's leaving", place.leaving())
        .await?;
    if every {
        walk.through("the member's return", place.coming_back())
            .await?;
    }

    let struck = walk.struck()?;
    println!(
        "{mode:?}, {plan}: {} points, {} deaths",
        struck.len(),
        walk.deaths()
    );
    let mut missed = points(mode, every);
    missed.retain(|point| plan_names(plan, point) && !struck.contains(point));
    Ok(missed)
}

fn plan_names(plan: &str, point: &str) -> bool {
    plan.starts_with('*') || plan.split(',').any(|rule| rule.starts_with(point))
}

/// Writes the chart `small` with a CRD, and with an optional ConfigMap named by `extra`.
fn chart(folder: &Path) -> Result<ChartSource> {
    let copied = folder.join("small");
    for part in ["templates", "crds"] {
        fs::create_dir_all(copied.join(part))?;
    }
    for file in ["Chart.yaml", "values.yaml", "templates"] {
        let from = Path::new(SMALL).join(file);
        if from.is_file() {
            fs::copy(from, copied.join(file))?;
            continue;
        }
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            fs::copy(entry.path(), copied.join(file).join(entry.file_name()))?;
        }
    }
    fs::write(copied.join("crds/widgets.yaml"), CRD)?;
    fs::write(copied.join("templates/extra.yaml"), EXTRA)?;
    fs::write(copied.join("templates/cert-manager.yaml"), CERT_MANAGER)?;
    Ok(ChartSource::folder(copied).version("1.0.0"))
}

fn values_with(message: &str) -> String {
    json!({"replicaCount": 0, "message": message}).to_string()
}

/// Returns values with a Deployment that the API server rejects, and a ConfigMap that only they contain.
fn broken(message: &str) -> String {
    json!({"replicaCount": 0, "message": message, "broken": true, "extra": "extra"}).to_string()
}

/// The objects that a user observes.
struct Place {
    home: FleetClient,
    edge: FleetClient,
    values: ValuesFile,
    cluster: Arc<Cluster>,
    /// The hub's kubeconfig of the member.
    kubeconfig: String,
}

/// A release that is never deleted. Its Deployment must keep its UID.
struct Keeper {
    uid: Option<String>,
    deleted: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Keeper {
    /// Returns once the watch has its first list.
    async fn watch(fleet_client: &FleetClient) -> Result<Self> {
        let api: Api<Deployment> = Api::namespaced(fleet_client.client.clone(), "keeper");
        let uid = api.get(&release("keeper")).await?.uid();
        let deleted = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&deleted);
        let config = watcher::Config::default();
        let mut events = watcher(api, config).default_backoff().boxed();
        let begun = async {
            while let Some(event) = events.next().await {
                if matches!(event, Ok(watcher::Event::InitDone)) {
                    break;
                }
            }
        };
        tokio::time::timeout(PATIENCE, begun).await?;
        let task = tokio::spawn(async move {
            while let Some(event) = events.next().await {
                if matches!(event, Ok(watcher::Event::Delete(_))) {
                    seen.store(true, Ordering::SeqCst);
                }
            }
        });
        Ok(Self { uid, deleted, task })
    }

    async fn unharmed(&self, place: &Place) -> Result<()> {
        let api: Api<Deployment> = Api::namespaced(place.edge.client.clone(), "keeper");
        let now = api.get(&release("keeper")).await?.uid();
        ensure!(now == self.uid, "the Deployment was recreated");
        ensure!(
            !self.deleted.load(Ordering::SeqCst),
            "the Deployment was deleted"
        );
        Ok(())
    }
}

fn release(tenant: &str) -> String {
    names::tenant_release(tenant, EDGE)
}

impl Place {
    fn of(walk: &Walk, values: ValuesFile) -> Self {
        Self {
            home: FleetClient::at(&walk.home()),
            edge: FleetClient::at(&walk.edge()),
            values,
            cluster: walk.home(),
            kubeconfig: walk.edge().kubeconfig_with_token(),
        }
    }

    async fn first(&self) -> Result<Keeper> {
        // If everything fails twice, each back-off grows.
        let crds: Api<CustomResourceDefinition> = Api::all(self.edge.client.clone());
        eventually_within("the member to be reconciled", PATIENCE * 3, async || {
            Ok(crds.get_opt(Tenant::crd_name()).await?)
        })
        .await?;
        self.edge.create("keeper", json!({})).await?;
        // A Tenant of the same name, so home shows its status.
        self.home.create("keeper", json!({})).await?;
        // If everything fails twice, the chart's fetch backs off in the hub and in the agent.
        for _ in 0..3 {
            if self.is_complete("keeper").await.is_ok() {
                break;
            }
        }
        self.is_complete("keeper").await?;
        self.home.ready("keeper").await?;
        Keeper::watch(&self.edge).await
    }

    async fn life(&self) -> Result<()> {
        self.edge.create("acme", json!({})).await?;
        self.is_complete("acme").await?;
        self.values.write(&values_with("second"))?;
        for name in ["acme", "keeper"] {
            self.has_message(name, "second").await?;
            self.is_complete(name).await?;
        }
        self.edge.remove("acme").await?;
        eventually("the workspace to be gone", async || {
            let gone = self.edge.namespace("acme").await?.is_none();
            Ok(gone.then_some(()))
        })
        .await?;
        let left = self.edge.revisions("acme", &release("acme")).await?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    }

    /// Orders a release from home, and then its removal.
    async fn ordered(&self, region: Value) -> Result<()> {
        let spec = json!({"account": {"name": "somebody"}, "region": region});
        let object = KryptonDeployment::new("ordered", serde_json::from_value(spec)?);
        let all: Api<KryptonDeployment> = Api::namespaced(self.home.client.clone(), "default");
        all.create(&PostParams::default(), &object).await?;
        eventually("the deployment to be ready", async || {
            let status = all.get("ordered").await?.status.unwrap_or_default();
            let ready = status.phase == Some(DeploymentPhase::Ready);
            ensure!(ready, "{status:?}");
            Ok(Some(()))
        })
        .await?;
        all.delete("ordered", &DeleteParams::default()).await?;
        eventually("the deployment to be gone", async || {
            match all.get_opt("ordered").await? {
                Some(object) => bail!("{object:?}"),
                None => Ok(Some(())),
            }
        })
        .await?;
        let left = self.edge.revisions("ordered", "ced-ordered").await?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    }

    /// Creates the lock of a dead Helm of ours, and a Secret that can't be decoded.
    async fn repair(&self) -> Result<()> {
        self.edge.create("mended", json!({})).await?;
        self.is_complete("mended").await?;
        let locked = json!({"metadata": {"labels": {"status": "pending-upgrade"}}});
        let before = self.patch_newest("mended", locked).await?;
        self.deployed_after("mended", before).await?;
        self.is_complete("mended").await?;
        // Valid base64, but not valid gzip.
        let rubbish = ByteString(b"H4sIAAAAAAAA/2RhbWFnZWQ=".to_vec());
        self.patch_newest("mended", json!({"data": {"release": rubbish}}))
            .await?;
        self.values.write(&values_with("third"))?;
        self.has_message("mended", "third").await?;
        self.is_complete("mended").await
    }

    /// Places a Tenant in a missing namespace.
    async fn placed(&self) -> Result<()> {
        self.cluster
            .kubectl(["create", "namespace", "team"])
            .await?;
        let spec = json!({"clusterRef": {"secretName": EDGE}});
        self.home.within("team").create("sent", spec).await?;
        let shown = [ALL_READY, ("Placed", "True", "Placed")];
        self.home.within("team").shows("sent", &shown).await?;
        let requested = names::RECONCILE_REQUESTED_ANNOTATION;
        self.home
            .within("team")
            .annotate("sent", requested, "now")
            .await?;
        let tenants = self.edge.within("team").tenants();
        eventually("the request to be passed on", async || {
            let found = tenants.get("sent").await?;
            let passed = found.annotations().get(requested).cloned();
            Ok((passed.as_deref() == Some("now")).then_some(()))
        })
        .await?;
        self.home.within("team").remove("sent").await?;
        let left = tenants.get_opt("sent").await?;
        ensure!(left.is_none(), "{left:?}");
        Ok(())
    }

    /// Objects of a failed revision that the next one doesn't contain are removed.
    async fn failed(&self) -> Result<()> {
        let names = ["keeper", "mended"];
        self.values.write(&broken("broken"))?;
        for name in names {
            self.newest_is_failed(name, 0).await?;
        }
        self.values.write(&values_with("fourth"))?;
        for name in names {
            self.has_message(name, "fourth").await?;
            self.is_complete(name).await?;
            let maps: Api<ConfigMap> = Api::namespaced(self.edge.client.clone(), name);
            eventually("the upgrade's objects to be gone", async || {
                Ok(maps.get_opt("extra").await?.is_none().then_some(()))
            })
            .await?;
        }
        Ok(())
    }

    /// Rolls back to the last deployed revision.
    async fn given_up(&self) -> Result<()> {
        let before = self.newest("keeper").await?;
        self.values.write(&broken("broken again"))?;
        // The failed revision has a number, too.
        self.deployed_after("keeper", before + 1).await?;
        self.has_message("keeper", "fifth").await?;
        self.values.write(&values_with("sixth"))?;
        for name in ["keeper", "mended", "late"] {
            self.has_message(name, "sixth").await?;
            self.is_complete(name).await?;
        }
        Ok(())
    }

    /// Keeps only the last failed attempts of an installation.
    async fn refused(&self) -> Result<()> {
        let before = self.newest("keeper").await?;
        self.values.write(&broken("broken 0"))?;
        // The member has received the values.
        self.newest_is_failed("keeper", before + 1).await?;
        self.edge.create("late", json!({})).await?;
        for number in 1..6 {
            self.newest_is_failed("late", number).await?;
            self.values.write(&broken(&format!("broken {number}")))?;
        }
        self.values.write(&values_with("fifth"))?;
        for name in ["late", "keeper"] {
            self.has_message(name, "fifth").await?;
            self.is_complete(name).await?;
        }
        Ok(())
    }

    async fn drift(&self) -> Result<()> {
        // Twice, because a failed correction is checked again, and may then be correct.
        for theirs in ["theirs", "theirs again"] {
            let maps: Api<ConfigMap> = Api::namespaced(self.edge.client.clone(), "keeper");
            maps.merge(&release("keeper"), &json!({"data": {"message": theirs}}))
                .await?;
            self.has_message("keeper", "fifth").await?;
        }
        // Also a configured label of the namespace.
        let namespaces: Api<Namespace> = Api::all(self.edge.client.clone());
        for theirs in ["theirs", "theirs again"] {
            let patch = json!({"metadata": {"labels": {"team": theirs.replace(' ', "-")}}});
            namespaces.merge("keeper", &patch).await?;
            eventually("the label to be restored", async || {
                let team = namespaces
                    .get("keeper")
                    .await?
                    .labels()
                    .get("team")
                    .cloned();
                ensure!(team.as_deref() == Some("a"), "{team:?}");
                Ok(Some(()))
            })
            .await?;
        }
        self.is_complete("keeper").await
    }

    async fn restore_from_backup(&self) -> Result<()> {
        let crds: Api<CustomResourceDefinition> = Api::all(self.edge.client.clone());
        let before = crds.get(Tenant::crd_name()).await?.uid();
        let tenants = self.edge.tenants();
        let former = tenants.get("keeper").await?.uid();
        let going = Held::delete(&self.edge, "going").await?;
        crds.delete(Tenant::crd_name(), &DeleteParams::default())
            .await?;
        eventually("a new CRD", async || {
            let now = crds.get(Tenant::crd_name()).await?;
            Ok((now.uid() != before).then_some(()))
        })
        .await?;
        eventually("the Tenant to be restored", async || {
            let back = tenants.get_opt("keeper").await?;
            Ok(back.filter(|tenant| tenant.uid() != former))
        })
        .await?;
        // A restarted process may not know of the deletion, so the user repeats it.
        eventually("the other Tenant to be deleted again", async || {
            let Some(back) = tenants.get_opt("going").await? else {
                return Ok(None);
            };
            if back.metadata.deletion_timestamp.is_none() {
                tenants.delete("going", &DeleteParams::default()).await?;
            }
            Ok(Some(()))
        })
        .await?;
        going.release().await?;
        self.is_complete("keeper").await
    }

    /// Creates the state of an earlier version, or of an earlier time.
    async fn age(&self) -> Result<()> {
        let (home, params) = (self.home.client.clone(), PatchParams::default());
        let old =
            json!({"metadata": {"annotations": {krypton_crds::SCHEMA_VERSION_ANNOTATION: "0"}}});
        let crds: Api<CustomResourceDefinition> = Api::all(self.edge.client.clone());
        crds.patch(Tenant::crd_name(), &params, &Patch::Merge(old))
            .await?;
        let maps: Api<ConfigMap> = Api::namespaced(self.edge.client.clone(), SYSTEM_NAMESPACE);
        let bare = json!({"metadata": {"labels": null, "annotations": null}});
        maps.patch(ANCHOR_NAME, &params, &Patch::Merge(bare))
            .await?;
        let secrets: Api<Secret> = Api::namespaced(home.clone(), HUB_NAMESPACE);
        let short = Patch::Merge(json!({"stringData": {"salt": "short"}}));
        secrets.patch(SALT_NAME, &params, &short).await?;
        let maps: Api<ConfigMap> = Api::namespaced(home.clone(), HUB_NAMESPACE);
        for (name, data) in [
            (
                krypton_types::names::CHART_CONFIG_MAP,
                json!({"resolved": "2020-01-01T00:00:00Z"}),
            ),
            (
                krypton_types::join_info::NAME,
                json!({"addresses": "elsewhere.example.org:1"}),
            ),
        ] {
            let patch = Patch::Merge(json!({"data": data}));
            maps.patch(name, &params, &patch).await?;
        }
        let token = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "krypton-join-old", "labels": {krypton_types::join_token::LABEL: "true"}},
            "stringData": {"cluster": "old", "secret-sha256": "00", "expires": "2020-01-01T00:00:00Z"},
        });
        self.home.apply_secret("krypton-join-old", &token).await
    }

    async fn renewed(&self) -> Result<()> {
        let crds: Api<CustomResourceDefinition> = Api::all(self.edge.client.clone());
        let maps: Api<ConfigMap> = Api::namespaced(self.home.client.clone(), HUB_NAMESPACE);
        let secrets: Api<Secret> = Api::namespaced(self.home.client.clone(), HUB_NAMESPACE);
        let text = async |name: &str, key: &str| {
            let data = maps.get(name).await?.data.unwrap_or_default();
            Ok::<_, anyhow::Error>(data.get(key).cloned().unwrap_or_default())
        };
        eventually("all to be up to date", async || {
            let crd = crds.get(Tenant::crd_name()).await?;
            let version = krypton_crds::schema_version(&crd);
            ensure!(version == Some(krypton_crds::SCHEMA_VERSION), "{version:?}");
            let resolved = text(krypton_types::names::CHART_CONFIG_MAP, "resolved").await?;
            ensure!(!resolved.starts_with("2020"), "{resolved}");
            let addresses = text(krypton_types::join_info::NAME, "addresses").await?;
            ensure!(!addresses.contains("elsewhere"), "{addresses}");
            let salt = secrets.get(SALT_NAME).await?.data.unwrap_or_default();
            ensure!(salt.values().all(|salt| salt.0.len() >= 32), "the old salt");
            let token = secrets.get_opt("krypton-join-old").await?;
            ensure!(token.is_none(), "the token is there");
            Ok(Some(()))
        })
        .await?;
        self.is_complete("keeper").await
    }

    async fn rotate(&self, more: &[&str]) -> Result<String> {
        let words = [&["rotate-ca", "-n", HUB_NAMESPACE], more].concat();
        kubectl_krypton(&self.cluster, &words).await
    }

    async fn rotated(&self) -> Result<()> {
        eventually("the rotation to end", async || {
            let status = self.rotate(&["--status"]).await?;
            ensure!(status.contains("the last one ended"), "{status}");
            Ok(Some(()))
        })
        .await
    }

    /// Adds a kubeconfig to a member that has an agent.
    async fn bound(&self) -> Result<()> {
        let members: Api<EdgeCluster> = Api::all(self.home.client.clone());
        self.home.add_member(EDGE, &self.kubeconfig).await?;
        let source = members.get(EDGE).await?.spec.source_ref;
        ensure!(source.is_some(), "the EdgeCluster names no source");
        self.is_complete("keeper").await
    }

    /// The member leaves together with its releases, as the user requests.
    async fn leaving(&self) -> Result<()> {
        // The CRDs of cert-manager are deleted with the last release, if it created them.
        for tenant in self.edge.tenants().list(&ListParams::default()).await? {
            if tenant.name_any() != "keeper" {
                self.edge.delete(&tenant.name_any()).await?;
                self.edge.gone(&tenant.name_any()).await?;
            }
        }
        let members: Api<EdgeCluster> = Api::all(self.home.client.clone());
        members
            .merge(EDGE, &json!({"spec": {"deletionPolicy": "Uninstall"}}))
            .await?;
        let held = eventually("the EdgeCluster to have its finalizer", async || {
            let object = members.get(EDGE).await?;
            let held = object.finalizers() == [names::UNINSTALL_FINALIZER];
            Ok(held.then_some(object))
        })
        .await?;
        members.delete(EDGE, &DeleteParams::default()).await?;
        eventually("the EdgeCluster to be gone", async || {
            match members.get_opt(EDGE).await? {
                Some(object) if object.uid() == held.uid() => bail!("{:?}", object.status),
                _ => Ok(Some(())),
            }
        })
        .await?;
        let left = self.edge.releases().await?;
        ensure!(left.is_empty(), "{left:?}");
        let crds: Api<CustomResourceDefinition> = Api::all(self.edge.client.clone());
        eventually("the CRD of cert-manager to be gone", async || {
            let there = crds.get_opt("orders.acme.cert-manager.io").await?;
            Ok(there.is_none().then_some(()))
        })
        .await
    }

    /// The member's source gets its label again.
    async fn coming_back(&self) -> Result<()> {
        let members: Api<EdgeCluster> = Api::all(self.home.client.clone());
        let maps: Api<ConfigMap> = Api::namespaced(self.home.client.clone(), HUB_NAMESPACE);
        self.home.label_member(EDGE, false).await?;
        eventually("the member to be accepted again", async || {
            let register = maps.get(MEMBERS_CONFIG_MAP).await?.data.unwrap_or_default();
            let named = register.values().any(|text| text.contains(EDGE));
            Ok((!named).then_some(()))
        })
        .await?;
        self.home.label_member(EDGE, true).await?;
        eventually("the EdgeCluster to be recreated", async || {
            Ok(members.get_opt(EDGE).await?)
        })
        .await
        .map(drop)
    }

    async fn newest(&self, tenant: &str) -> Result<u32> {
        let revisions = self.edge.revisions(tenant, &release(tenant)).await?;
        let (newest, _) = revisions.last().context("no revision")?;
        Ok(*newest)
    }

    async fn newest_is_failed(&self, tenant: &str, at_least: u32) -> Result<()> {
        let what = format!("an attempt for {tenant} to fail");
        eventually(&what, async || {
            let revisions = self.edge.revisions(tenant, &release(tenant)).await?;
            match revisions.last() {
                Some((newest, status)) if *newest >= at_least && status == "failed" => Ok(Some(())),
                _ => bail!("{revisions:?}"),
            }
        })
        .await
    }

    async fn deployed_after(&self, tenant: &str, before: u32) -> Result<()> {
        let what = format!("a revision of {tenant} after {before} to be deployed");
        eventually(&what, async || {
            let revisions = self.edge.revisions(tenant, &release(tenant)).await?;
            match revisions.last() {
                Some((newest, status)) if *newest > before && status == "deployed" => Ok(Some(())),
                _ => bail!("{revisions:?}"),
            }
        })
        .await
    }

    /// Returns the number of the newest revision.
    async fn patch_newest(&self, tenant: &str, patch: Value) -> Result<u32> {
        let (release, newest) = (release(tenant), self.newest(tenant).await?);
        let secrets: Api<Secret> = Api::namespaced(self.edge.client.clone(), tenant);
        let name = format!("sh.helm.release.v1.{release}.v{newest}");
        secrets.merge(&name, &patch).await?;
        Ok(newest)
    }

    /// Waits until the live objects contain these values.
    async fn has_message(&self, tenant: &str, message: &str) -> Result<()> {
        let maps: Api<ConfigMap> = Api::namespaced(self.edge.client.clone(), tenant);
        let what = format!("the release of {tenant} to have the message {message}");
        eventually(&what, async || {
            let data = maps.get(&release(tenant)).await?.data.unwrap_or_default();
            let found = data.get("message").cloned().unwrap_or_default();
            ensure!(found == message, "the message is {found}");
            Ok(Some(()))
        })
        .await
    }

    /// Waits until the Tenant is ready, its newest revision is the only deployed one, and no lock is left.
    async fn is_complete(&self, tenant: &str) -> Result<()> {
        self.edge.ready(tenant).await?;
        let what = format!("the release of {tenant} to be complete");
        eventually(&what, async || {
            let revisions = self.edge.revisions(tenant, &release(tenant)).await?;
            let deployed = revisions.iter().filter(|(_, status)| status == "deployed");
            ensure!(deployed.count() == 1, "{revisions:?}");
            let last = revisions.last().map(|(_, status)| status.as_str());
            ensure!(last == Some("deployed"), "{revisions:?}");
            Ok(Some(()))
        })
        .await
    }
}
