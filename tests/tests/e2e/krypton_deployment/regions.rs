//! Home with KryptonDeployments and their edge clusters, from the view of a user of home.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::{Event, Namespace};
use krypton_crds::krypton_deployment::{KryptonDeployment, KryptonDeploymentStatus};
use krypton_tests::{
    Agent, AgentOptions, Cluster, Hub, HubOptions, Membership, Merge as _, Mode, Parts,
    ServedChart, TestResult, eventually,
    fleet::{FleetClient, HUB_NAMESPACE, condition},
    no_tenants::reject_tenant_crd,
    wait_until_gone,
};
use kube::{
    Api,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};

/// Deviations from the default setup.
#[derive(Default)]
pub(crate) struct RegionOptions {
    /// Like clusters of Kamaji's tenants: their Secrets contain only `admin.conf`, and their users can't create the CRD
    /// of Tenants.
    pub(crate) as_kamajis: bool,
    /// Additional flags of the hub, or replacements of the default ones.
    pub(crate) flags: &'static [&'static str],
}

/// Home with its hub, and edge clusters by region name. The actors are dropped first and the clusters last.
pub(crate) struct Regions {
    pub(crate) hub: Hub,
    members: BTreeMap<&'static str, Membership>,
    options: Vec<String>,
    mode: Mode,
    pub(crate) chart: ServedChart,
    pub(crate) home: Cluster,
    pub(crate) edges: BTreeMap<&'static str, Cluster>,
    as_kamajis: bool,
}

impl Regions {
    pub(crate) async fn start(name: &str, mode: Mode, regions: &[&'static str]) -> Self {
        Self::start_with(name, mode, regions, RegionOptions::default())
            .await
            .unwrap()
    }

    pub(crate) async fn start_with(
        name: &str,
        mode: Mode,
        regions: &[&'static str],
        unusual: RegionOptions,
    ) -> TestResult<Self> {
        let name = |part: &str| format!("{name}-{part}-{mode:?}").to_lowercase();
        let home = Cluster::start(&name("home"), Parts::ControlPlane).await?;
        let mut edges = BTreeMap::new();
        for region in regions {
            let edge = Cluster::start(&name(region), Parts::WithControllers).await?;
            if unusual.as_kamajis {
                reject_tenant_crd(&edge).await?;
            }
            edges.insert(*region, edge);
        }
        let chart = ServedChart::small("replicaCount: 0").await?;
        let mut options = chart.flags(&[
            "--self-cluster=false",
            "--ensure-watch-crds",
            "--proxy-grace=5s",
        ]);
        for flag in unusual.flags {
            options.retain(|other| other.split('=').next() != flag.split('=').next());
            options.push((*flag).to_owned());
        }
        let hub = Hub::start(&hub_options(&home, &options))?;
        let mut this = Self {
            hub,
            members: BTreeMap::new(),
            options,
            mode,
            chart,
            home,
            edges,
            as_kamajis: unusual.as_kamajis,
        };
        for region in regions {
            let edge = &this.edges[region];
            match mode {
                // Without a label. A KryptonDeployment that names the Secret makes it a member.
                Mode::Proxy | Mode::SelfCluster => {
                    let keys: &[&str] = match unusual.as_kamajis {
                        true => &["admin.conf"],
                        false => &["kubeconfig"],
                    };
                    let name = format!("{region}-kubeconfig");
                    this.create_secret(HUB_NAMESPACE, &name, edge, keys).await?;
                }
                Mode::Agent => {
                    let member =
                        Membership::join(mode, &mut this.hub, &this.home, edge, region).await?;
                    this.members.insert(region, member);
                }
            }
        }
        Ok(this)
    }

    /// Returns the region field of a KryptonDeployment.
    pub(crate) fn region(&self, name: &str) -> Value {
        match self.mode {
            Mode::Proxy if self.as_kamajis => {
                let secret = json!({"name": self.member(name), "key": "admin.conf"});
                json!({"name": name, "kubeconfig": {"secret": secret}})
            }
            _ => json!({"name": name}),
        }
    }

    /// Returns the member's name.
    pub(crate) fn member(&self, region: &str) -> String {
        match self.mode {
            Mode::Agent => region.to_owned(),
            _ => format!("{region}-kubeconfig"),
        }
    }

    /// Kills the hub, and starts another one.
    pub(crate) async fn replace_hub(&mut self) -> TestResult {
        self.hub.kill9().await?;
        let options = hub_options(&self.home, &self.options).on_port_of(&self.hub);
        self.hub = Hub::start_ready(&options).await?;
        Ok(())
    }

    /// Replaces the agent of this region, if any, by one with these flags.
    pub(crate) async fn replace_agent(&mut self, region: &str, flags: &[&str]) {
        let edge = &self.edges[region];
        let member = self.members.get_mut(region);
        if let Some(agent) = member.and_then(Membership::agent) {
            agent.stop().await.unwrap();
            let options = AgentOptions::new(edge.kubeconfig()).args(flags.iter().copied());
            *agent = Agent::start(&options).unwrap();
        }
    }

    pub(crate) fn edge(&self, region: &str) -> FleetClient {
        FleetClient::new(&self.edges[region])
    }

    /// Creates a Secret with the kubeconfig under each of these keys.
    pub(crate) async fn create_secret(
        &self,
        namespace: &str,
        name: &str,
        edge: &Cluster,
        keys: &[&str],
    ) -> Result<()> {
        let kubeconfig = edge.kubeconfig_with_token();
        let data: BTreeMap<&str, &str> = keys.iter().map(|key| (*key, &*kubeconfig)).collect();
        let namespaces: Api<Namespace> = Api::all(self.home.client());
        if namespaces.get_opt(namespace).await?.is_none() {
            let mut object = Namespace::default();
            object.metadata.name = Some(namespace.to_owned());
            namespaces.create(&PostParams::default(), &object).await?;
        }
        let home = FleetClient::new(&self.home).in_namespace(namespace);
        home.apply_secret(name, json!({ "stringData": data })).await
    }

    pub(crate) fn api(&self, namespace: &str) -> Api<KryptonDeployment> {
        Api::namespaced(self.home.client(), namespace)
    }

    pub(crate) async fn create(
        &self,
        (namespace, name): (&str, &str),
        region: Value,
    ) -> KryptonDeployment {
        let spec = json!({"account": {"name": "acme"}, "region": region});
        let object = KryptonDeployment::new(name, serde_json::from_value(spec).unwrap());
        let what = format!("KryptonDeployment {name} to be admitted");
        eventually(&what, async || {
            let params = PostParams::default();
            Ok(Some(self.api(namespace).create(&params, &object).await?))
        })
        .await
        .unwrap()
    }

    pub(crate) async fn patch(&self, (namespace, name): (&str, &str), patch: Value) {
        let api = self.api(namespace);
        api.merge(name, &patch).await.unwrap();
    }

    async fn delete(&self, (namespace, name): (&str, &str)) {
        let params = DeleteParams::default();
        self.api(namespace).delete(name, &params).await.unwrap();
    }

    /// Deletes the KryptonDeployment, and waits until it is gone.
    pub(crate) async fn remove(&self, key: (&str, &str)) {
        self.delete(key).await;
        self.wait_gone(key).await;
    }

    pub(crate) async fn wait_until(
        &self,
        (namespace, name): (&str, &str),
        what: &str,
        right: impl Fn(&KryptonDeployment, &KryptonDeploymentStatus) -> bool,
    ) -> KryptonDeployment {
        let what = format!("{namespace}/{name} to show {what}");
        let api = self.api(namespace);
        let waiting = eventually(&what, async || {
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
        waiting.await.unwrap()
    }

    pub(crate) async fn wait_for(
        &self,
        key: (&str, &str),
        expected: (&str, &str, &str),
    ) -> KryptonDeployment {
        let (type_, truth, reason) = expected;
        let right = |_: &KryptonDeployment, status: &KryptonDeploymentStatus| {
            condition(&status.conditions, type_)
                .is_some_and(|found| found.status == truth && found.reason == reason)
        };
        self.wait_until(key, &format!("{expected:?}"), right).await
    }

    async fn wait_gone(&self, (namespace, name): (&str, &str)) {
        wait_until_gone(&self.api(namespace), name).await.unwrap();
    }

    async fn events(&self, (namespace, name): (&str, &str)) -> Result<Vec<Event>> {
        let events: Api<Event> = Api::namespaced(self.home.client(), namespace);
        let params = ListParams::default().fields(&format!(
            "involvedObject.kind=KryptonDeployment,involvedObject.name={name}"
        ));
        Ok(events.list(&params).await?.items)
    }

    /// Waits for an event with this reason and a message that contains this text.
    pub(crate) async fn wait_for_event(&self, key: (&str, &str), reason: &str, text: &str) {
        let waiting = eventually("the event", async || {
            let mut all = self.events(key).await?;
            all.retain(|event| event.reason.as_deref() == Some(reason));
            let messages: Vec<String> = all.into_iter().filter_map(|event| event.message).collect();
            match messages.iter().any(|message| message.contains(text)) {
                true => Ok(Some(())),
                false => bail!("{reason}: {messages:?}"),
            }
        });
        waiting.await.unwrap();
    }

    pub(crate) async fn wait_for_events(&self, key: (&str, &str), reasons: &[&str]) {
        let waiting = eventually("the events", async || {
            let all = self.events(key).await?;
            let recorded: Vec<String> = all.into_iter().filter_map(|event| event.reason).collect();
            let missing = reasons
                .iter()
                .find(|expected| !recorded.iter().any(|recorded| recorded == *expected));
            match missing {
                None => Ok(Some(())),
                Some(missing) => bail!("{missing} is missing in {recorded:?}"),
            }
        });
        waiting.await.unwrap();
    }
}

pub(crate) fn placed_clusters(status: &KryptonDeploymentStatus) -> Vec<&str> {
    let places = status.placements.iter().flatten();
    places.map(|place| place.cluster.as_str()).collect()
}

fn hub_options<'a>(home: &'a Cluster, options: &[String]) -> HubOptions<'a> {
    let every = ("KRYPTON_CHECK_INTERVAL", "1s");
    HubOptions::new(home.kubeconfig())
        .args(options.to_vec())
        .env(every.0, every.1)
}
