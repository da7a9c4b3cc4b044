//! KryptonDeployments on home: routed to their member, carried out there, told of at home, and gone only when
//! they are gone there.

#![allow(
    clippy::unwrap_used,
    reason = "this file is tests only, its helping functions included"
)]

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Event, Namespace},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use krypton_common::names;
use krypton_crds::krypton_deployment::{
    DeploymentPhase, KryptonDeployment, KryptonDeploymentStatus,
};
use krypton_tests::{
    ChartRepository, ChartSource, Cluster, Hub, HubOptions, Membership, Mode, Parts, eventually,
    fleet::{Desk, HUB_NAMESPACE, PATIENCE, ValuesFile, chart_flags, condition, values_flag},
    in_both_modes,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

in_both_modes!(
    a_deployment_is_routed_installed_put_right_and_goes_with_its_object,
    a_region_that_moves_is_installed_there_before_it_goes_here,
    a_deployment_of_an_edge_that_is_away_waits_and_the_annotation_lets_go,
    of_one_name_there_is_one_and_the_crd_takes_nothing_along,
);

const READY: (&str, &str, &str) = ("Ready", "True", "Deployed");

/// Home with its hub, and edges by these names of regions. Who acts goes first, the clusters last.
struct Regions {
    hub: Hub,
    members: Vec<Membership>,
    options: Vec<String>,
    mode: Mode,
    _chart: (ChartRepository, ValuesFile),
    home: Cluster,
    edges: BTreeMap<&'static str, Cluster>,
}

impl Regions {
    async fn start(name: &str, mode: Mode, regions: &[&'static str]) -> Self {
        let name = |of: &str| format!("{name}-{of}-{mode:?}").to_lowercase();
        let home = Cluster::start(&name("home"), Parts::ControlPlane).await;
        let home = home.unwrap();
        let mut edges = BTreeMap::new();
        for region in regions {
            let edge = Cluster::start(&name(region), Parts::WithControllers).await;
            edges.insert(*region, edge.unwrap());
        }
        let charts = [ChartSource::small("1.0.0")];
        let repository = ChartRepository::start(&charts).await.unwrap();
        let values = ValuesFile::new("replicaCount: 0").unwrap();
        let mut options = chart_flags(&repository, "small", "1.0.0");
        options.push(values_flag(&values));
        options.push("--self-cluster=false".to_owned());
        options.push("--ensure-watch-crds".to_owned());
        options.push("--proxy-grace=5s".to_owned());
        let hub = Hub::start(&options_of(&home, &options)).unwrap();
        let mut this = Self {
            hub,
            members: Vec::new(),
            options,
            mode,
            _chart: (repository, values),
            home,
            edges,
        };
        for region in regions {
            let edge = &this.edges[region];
            match mode {
                // No label: who names it makes it a member.
                Mode::Proxy | Mode::SelfCluster => this
                    .secret(HUB_NAMESPACE, &format!("{region}-kubeconfig"), edge)
                    .await
                    .unwrap(),
                Mode::Agent => {
                    let joining = Membership::join(mode, &mut this.hub, &this.home, edge, region);
                    let member = joining.await.unwrap();
                    this.members.push(member);
                }
            }
        }
        this
    }

    /// The member's name.
    fn member(&self, region: &str) -> String {
        match self.mode {
            Mode::Agent => region.to_owned(),
            _ => format!("{region}-kubeconfig"),
        }
    }

    fn edge(&self, region: &str) -> Desk {
        Desk::at(&self.edges[region])
    }

    async fn secret(&self, namespace: &str, name: &str, edge: &Cluster) -> Result<()> {
        let kubeconfig = edge.kubeconfig_with_token();
        let namespaces: Api<Namespace> = Api::all(self.home.client());
        if namespaces.get_opt(namespace).await?.is_none() {
            let mut made = Namespace::default();
            made.metadata.name = Some(namespace.to_owned());
            namespaces.create(&PostParams::default(), &made).await?;
        }
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace},
            "stringData": {"admin.conf": kubeconfig, "kubeconfig": kubeconfig},
        });
        self.home.apply(&secret.to_string()).await.map(drop)
    }

    fn all(&self, namespace: &str) -> Api<KryptonDeployment> {
        Api::namespaced(self.home.client(), namespace)
    }

    async fn create(&self, namespace: &str, name: &str, region: Value) -> KryptonDeployment {
        let spec = json!({"account": {"name": "acme"}, "region": region});
        let object = KryptonDeployment::new(name, serde_json::from_value(spec).unwrap());
        let what = format!("KryptonDeployment {name} to be admitted");
        eventually(&what, PATIENCE, async || {
            let params = PostParams::default();
            Ok(Some(self.all(namespace).create(&params, &object).await?))
        })
        .await
        .unwrap()
    }

    async fn patch(&self, namespace: &str, name: &str, patch: Value) {
        let params = PatchParams::default();
        let api = self.all(namespace);
        api.patch(name, &params, &Patch::Merge(patch))
            .await
            .unwrap();
    }

    async fn delete(&self, namespace: &str, name: &str) {
        let params = DeleteParams::default();
        self.all(namespace).delete(name, &params).await.unwrap();
    }

    async fn says(
        &self,
        (namespace, name): (&str, &str),
        what: &str,
        right: impl Fn(&KryptonDeployment, &KryptonDeploymentStatus) -> bool,
    ) -> KryptonDeployment {
        let what = format!("{namespace}/{name} to say {what}");
        let api = self.all(namespace);
        let asked = eventually(&what, PATIENCE, async || {
            let object = api.get(name).await?;
            let status = object.status.clone().unwrap_or_default();
            let now = status.observed_generation == object.metadata.generation;
            if !now || !right(&object, &status) {
                bail!(
                    "{:?} {:?} {status:?}",
                    object.metadata.finalizers,
                    object.metadata.annotations
                );
            }
            Ok(Some(object))
        });
        asked.await.unwrap()
    }

    async fn shows(&self, key: (&str, &str), expected: (&str, &str, &str)) -> KryptonDeployment {
        let (type_, truth, reason) = expected;
        let right = |_: &KryptonDeployment, status: &KryptonDeploymentStatus| {
            condition(&status.conditions, type_)
                .is_some_and(|found| found.status == truth && found.reason == reason)
        };
        self.says(key, &format!("{expected:?}"), right).await
    }

    async fn gone(&self, namespace: &str, name: &str) {
        let api = self.all(namespace);
        let what = format!("{namespace}/{name} to be gone");
        let asked = eventually(&what, PATIENCE, async || match api.get_opt(name).await? {
            None => Ok(Some(())),
            Some(object) => bail!("{:?} {:?}", object.metadata, object.status),
        });
        asked.await.unwrap();
    }

    async fn told(&self, namespace: &str, name: &str, reasons: &[&str]) {
        let events: Api<Event> = Api::namespaced(self.home.client(), namespace);
        let params = ListParams::default().fields(&format!(
            "involvedObject.kind=KryptonDeployment,involvedObject.name={name}"
        ));
        let asked = eventually("the events", PATIENCE, async || {
            let all = events.list(&params).await?.items;
            let told: Vec<String> = all.into_iter().filter_map(|event| event.reason).collect();
            let missing = reasons
                .iter()
                .find(|it| !told.iter().any(|told| told == *it));
            match missing {
                None => Ok(Some(())),
                Some(missing) => bail!("{missing} is not among {told:?}"),
            }
        });
        asked.await.unwrap();
    }
}

fn placed(status: &KryptonDeploymentStatus) -> Vec<&str> {
    let places = status.places.iter().flatten();
    places.map(|place| place.cluster.as_str()).collect()
}

fn options_of<'a>(home: &'a Cluster, options: &[String]) -> HubOptions<'a> {
    let every = ("KRYPTON_CHECK_INTERVAL", "1s");
    HubOptions::new(home.kubeconfig())
        .args(options.to_vec())
        .env(every.0, every.1)
}

async fn namespace_goes(desk: &Desk, name: &str) {
    let what = format!("namespace {name} to be gone");
    let asked = eventually(&what, PATIENCE, async || {
        Ok(desk.namespace(name).await?.is_none().then_some(()))
    });
    asked.await.unwrap();
}

async fn a_deployment_is_routed_installed_put_right_and_goes_with_its_object(mode: Mode) {
    let mut regions = Regions::start("routed", mode, &["paris"]).await;
    let key = ("default", "acme");
    regions.create(key.0, key.1, json!({"name": "paris"})).await;
    let object = regions.shows(key, READY).await;
    let status = object.status.clone().unwrap();
    assert_eq!(status.phase, Some(DeploymentPhase::Ready));
    let line = status.last_message.clone().unwrap();
    assert_eq!(line, "Successfully deployed to region paris");
    let chart = status.last_applied_chart.clone().unwrap();
    assert!(chart.ends_with("/small:1.0.0"), "{chart}");
    let finalizers = object.finalizers();
    assert_eq!(finalizers, [names::DEPLOYMENT_FINALIZER]);
    assert_eq!(placed(&status), [regions.member("paris")]);
    regions
        .shows(
            key,
            (
                "TargetClusterResolved",
                "True",
                if mode == Mode::Agent {
                    "ByAgent"
                } else {
                    "Resolved"
                },
            ),
        )
        .await;
    let told = [
        "AccountValidated",
        "FinalizerAdded",
        "Routing",
        "EdgeNamespaceCreated",
        "HelmDeployed",
        "Ready",
    ];
    regions.told(key.0, key.1, &told).await;
    let desk = regions.edge("paris");
    desk.newest_is("acme", "ced-acme", 1, "deployed")
        .await
        .unwrap();

    // What the owner of the edge takes away comes back, without a revision.
    let maps: Api<ConfigMap> = Api::namespaced(desk.client.clone(), "acme");
    let params = DeleteParams::default();
    maps.delete("ced-acme", &params).await.unwrap();
    let asked = eventually("the ConfigMap to be back", PATIENCE, async || {
        Ok(maps.get_opt("ced-acme").await?)
    });
    asked.await.unwrap();
    desk.newest_is("acme", "ced-acme", 1, "deployed")
        .await
        .unwrap();
    regions.told(key.0, key.1, &["RepairTriggered"]).await;

    // A hub that starts has nothing but what is on home.
    let before = desk.releases().await.unwrap();
    regions.hub.kill9().await.unwrap();
    let options = options_of(&regions.home, &regions.options).in_place_of(&regions.hub);
    let next = Hub::start(&options).unwrap();
    regions.hub = next;
    regions.hub.ready(PATIENCE).await.unwrap();
    let account = json!({"spec": {"account": {"owner": "somebody"}}});
    regions.patch(key.0, key.1, account).await;
    regions.shows(key, READY).await;
    assert_eq!(desk.releases().await.unwrap(), before);

    regions.delete(key.0, key.1).await;
    regions.gone(key.0, key.1).await;
    assert!(desk.revisions("acme", "ced-acme").await.unwrap().is_empty());
    namespace_goes(&desk, "acme").await;
    let told = [
        "DeleteStarted",
        "HelmUninstalled",
        "EdgeNamespaceDeleteRequested",
        "FinalizerRemoved",
    ];
    regions.told(key.0, key.1, &told).await;
}

async fn a_region_that_moves_is_installed_there_before_it_goes_here(mode: Mode) {
    let regions = Regions::start("moved", mode, &["paris", "rome"]).await;
    let key = ("default", "acme");
    regions.create(key.0, key.1, json!({"name": "paris"})).await;
    regions.shows(key, READY).await;
    let (paris, rome) = (regions.edge("paris"), regions.edge("rome"));
    // A region that there is not: nothing goes.
    let nowhere = json!({"spec": {"region": {"name": "nowhere"}}});
    regions.patch(key.0, key.1, nowhere).await;
    regions
        .shows(key, ("Ready", "False", "EdgeUnavailable"))
        .await;
    regions
        .shows(key, ("TargetClusterResolved", "False", "SecretNotFound"))
        .await;
    let revisions = [(1, "deployed".to_owned())];
    assert_eq!(
        paris.revisions("acme", "ced-acme").await.unwrap(),
        revisions
    );

    regions
        .patch(key.0, key.1, json!({"spec": {"region": {"name": "rome"}}}))
        .await;
    let member = regions.member("rome");
    let object = regions
        .says(key, "that it is at its new place only", |_, status| {
            placed(status) == [member.as_str()]
        })
        .await;
    assert!(object.metadata.deletion_timestamp.is_none());
    regions.shows(key, READY).await;
    assert_eq!(rome.revisions("acme", "ced-acme").await.unwrap(), revisions);
    assert!(
        paris
            .revisions("acme", "ced-acme")
            .await
            .unwrap()
            .is_empty()
    );
    namespace_goes(&paris, "acme").await;
    regions
        .told(key.0, key.1, &["Routing", "HelmUninstalled"])
        .await;
}

async fn a_deployment_of_an_edge_that_is_away_waits_and_the_annotation_lets_go(mode: Mode) {
    let regions = Regions::start("away", mode, &["paris"]).await;
    let desk = regions.edge("paris");
    for name in ["acme", "other"] {
        regions
            .create("default", name, json!({"name": "paris"}))
            .await;
        regions.shows(("default", name), READY).await;
    }
    let edge = &regions.edges["paris"];
    edge.stop_apiserver().await.unwrap();
    regions
        .shows(("default", "acme"), ("Ready", "Unknown", "EdgeUnavailable"))
        .await;
    for name in ["acme", "other"] {
        regions.delete("default", name).await;
        let waits = |_: &KryptonDeployment, status: &KryptonDeploymentStatus| {
            let line = status.last_message.as_deref().unwrap_or_default();
            line.starts_with("deletion waits: EdgeCluster paris")
                && line.contains(names::ORPHAN_ANNOTATION)
        };
        regions
            .says(("default", name), "that it waits", waits)
            .await;
    }
    let orphan = json!({"metadata": {"annotations": {names::ORPHAN_ANNOTATION: "true"}}});
    regions.patch("default", "acme", orphan).await;
    regions.gone("default", "acme").await;
    regions
        .told("default", "acme", &["Orphaned", "FinalizerRemoved"])
        .await;
    assert!(
        regions
            .all("default")
            .get_opt("other")
            .await
            .unwrap()
            .is_some()
    );

    edge.start_apiserver().await.unwrap();
    regions.gone("default", "other").await;
    assert!(
        desk.revisions("other", "ced-other")
            .await
            .unwrap()
            .is_empty()
    );
    desk.newest_is("acme", "ced-acme", 1, "deployed")
        .await
        .unwrap();
    // Made again, it is the one that it was.
    regions
        .create("default", "acme", json!({"name": "paris"}))
        .await;
    regions.shows(("default", "acme"), READY).await;
    desk.newest_is("acme", "ced-acme", 1, "deployed")
        .await
        .unwrap();
}

async fn of_one_name_there_is_one_and_the_crd_takes_nothing_along(mode: Mode) {
    let regions = Regions::start("named", mode, &["paris"]).await;
    let desk = regions.edge("paris");
    let long = "a".repeat(63);
    let paris = json!({"name": "paris"});
    regions.create("default", "acme", paris.clone()).await;
    regions.shows(("default", "acme"), READY).await;
    regions.create("default", &long, paris.clone()).await;
    regions.shows(("default", &long), READY).await;
    let release = names::deployment_release(&long);
    assert!(release.len() <= names::RELEASE_NAME_MAX);
    desk.newest_is(&long, &release, 1, "deployed")
        .await
        .unwrap();
    let before = desk.releases().await.unwrap();

    regions.create("kube-public", "acme", paris.clone()).await;
    let younger = regions
        .shows(("kube-public", "acme"), ("Ready", "False", "ReleaseInUse"))
        .await;
    let line = younger.status.unwrap().last_message.unwrap();
    assert!(
        line.contains("belongs to KryptonDeployment default/acme"),
        "{line}"
    );
    regions
        .create("default", "too.many.dots", paris.clone())
        .await;
    regions
        .shows(
            ("default", "too.many.dots"),
            ("Ready", "False", "WorkspaceInvalid"),
        )
        .await;
    for (namespace, name) in [("kube-public", "acme"), ("default", "too.many.dots")] {
        regions.delete(namespace, name).await;
        regions.gone(namespace, name).await;
    }
    assert_eq!(desk.releases().await.unwrap(), before);

    let crds: Api<CustomResourceDefinition> = Api::all(regions.home.client());
    let name = KryptonDeployment::crd().name_any();
    crds.delete(&name, &DeleteParams::default()).await.unwrap();
    let asked = eventually("the CRD to be gone", PATIENCE, async || {
        Ok(crds.get_opt(&name).await?.is_none().then_some(()))
    });
    asked.await.unwrap();
    assert_eq!(desk.releases().await.unwrap(), before);
    // Made again they are the ones that they were.
    let params = PostParams::default();
    crds.create(&params, &KryptonDeployment::crd())
        .await
        .unwrap();
    regions.create("default", "acme", paris).await;
    regions.shows(("default", "acme"), READY).await;
    assert_eq!(desk.releases().await.unwrap(), before);
}

#[tokio::test]
async fn a_secret_is_named_by_whom_it_is_open_to_and_each_way_to_name_it_is_told_of() {
    let regions = Regions::start("secrets", Mode::Proxy, &["paris", "rome"]).await;
    let rome = &regions.edges["rome"];
    regions.secret("team-a", "rome-admin", rome).await.unwrap();
    let of = |namespace: &str, name: &str, key: &str| json!({"name": "somewhere", "kubeconfig": {"secret": {"namespace": namespace, "name": name, "key": key}}});
    // Another's, and none at all: both are told in one way.
    regions
        .create(
            "default",
            "theirs",
            of("team-a", "rome-admin", "admin.conf"),
        )
        .await;
    regions
        .create("default", "guessed", of("team-a", "guessed", "admin.conf"))
        .await;
    for name in ["theirs", "guessed"] {
        regions
            .shows(
                ("default", name),
                ("TargetClusterResolved", "False", "SecretNotAllowed"),
            )
            .await;
        regions
            .shows(("default", name), ("Ready", "False", "EdgeUnavailable"))
            .await;
    }
    regions
        .create("team-a", "own", of("team-a", "rome-admin", "admin.conf"))
        .await;
    regions.shows(("team-a", "own"), READY).await;
    // Named in the namespace that it is in, it is a member, and still not everybody's.
    regions
        .shows(
            ("default", "theirs"),
            ("TargetClusterResolved", "False", "SecretNotAllowed"),
        )
        .await;
    let label = format!("{}=true", names::OPEN_TO_DEPLOYMENTS_LABEL);
    let words = [
        "label",
        "secret",
        "rome-admin",
        "--namespace=team-a",
        &label,
    ];
    regions.home.kubectl(words).await.unwrap();
    regions.shows(("default", "theirs"), READY).await;

    // By the deprecated field, by a key that is not there, and without an account.
    let deprecated = json!({"name": "x", "kubeconfigSecretName": "paris-kubeconfig"});
    regions.create("default", "deprecated", deprecated).await;
    regions.shows(("default", "deprecated"), READY).await;
    regions
        .patch(
            "default",
            "deprecated",
            json!({"spec": {"account": {"name": ""}}}),
        )
        .await;
    let missing = regions
        .shows(
            ("default", "deprecated"),
            ("Ready", "False", "AccountMissing"),
        )
        .await;
    assert_eq!(missing.status.unwrap().phase, Some(DeploymentPhase::Error));
    let desk = regions.edge("paris");
    desk.newest_is("deprecated", "ced-deprecated", 1, "deployed")
        .await
        .unwrap();
    regions
        .told("default", "deprecated", &["AccountMissing"])
        .await;
    // Which keeps nobody from taking it away.
    regions.delete("default", "deprecated").await;
    regions.gone("default", "deprecated").await;
    assert!(
        desk.revisions("deprecated", "ced-deprecated")
            .await
            .unwrap()
            .is_empty()
    );
}
