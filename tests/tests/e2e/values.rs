//! Verifies the chart's values from all sources: the fleet's file, ConfigMaps and Secrets, a member, and a Tenant.
//! Missing sources change nothing.

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::Secret;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_tests::{
    ChartSource, Hub, HubOptions, Membership, Merge as _, Mode, Parts, STEP_DEADLINE, ServedChart,
    TestResult, Tools, assert_contains, by_agent, eventually, fleet::FleetClient, home_and_edge,
    process::Invocation,
};
use krypton_types::values::merge;
use kube::{Api, api::DeleteParams};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const MISSING: (&str, &str, &str) = ("ValuesResolved", "False", "ValuesMissing");
const RESOLVED: (&str, &str, &str) = ("ValuesResolved", "True", "Resolved");
const EDGE: &str = "edge-1";
const HOME: &str = "self-cluster";
const SECRET: &str = "fleet-secret";

by_agent!(values_reach_their_targets_and_loss_changes_nothing);

/// The release of Tenant `acme` on one member.
struct Release<'a> {
    fleet_client: &'a FleetClient,
    name: String,
}

impl<'a> Release<'a> {
    fn new(tenant: &str, member: &str, fleet_client: &'a FleetClient) -> Self {
        Self {
            fleet_client,
            name: format!("tenant-{tenant}-{member}"),
        }
    }

    /// Waits until this revision is deployed, and checks its message.
    async fn wait_with_message(&self, namespace: &str, revision: u32, message: &str) {
        let (fleet_client, name) = (self.fleet_client, self.name.as_str());
        fleet_client
            .wait_deployed(namespace, name, revision)
            .await
            .unwrap();
        let found = fleet_client.message(namespace, name).await.unwrap();
        assert_eq!(found.as_deref(), Some(message));
    }
}

async fn write_secret(home: &FleetClient, values: &str) {
    let secret = json!({"stringData": {"values.yaml": values}});
    home.apply_secret(SECRET, secret).await.unwrap();
}

async fn delete_secret(home: &FleetClient) {
    let secrets: Api<Secret> = Api::namespaced(home.client.clone(), "default");
    secrets
        .delete(SECRET, &DeleteParams::default())
        .await
        .unwrap();
}

fn config_map(name: &str, key: &str, values: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default"}, "data": {key: values},
    })
    .to_string()
}

/// Waits until no condition mentions the values of this member.
async fn wait_for_no_values_condition(home: &FleetClient, member: &str) {
    let members: Api<EdgeCluster> = Api::all(home.client.clone());
    eventually("no message about values", async || {
        let conditions = members.get(member).await?.status.unwrap_or_default();
        match conditions
            .conditions
            .iter()
            .find(|condition| condition.type_ == MISSING.0)
        {
            None => Ok(Some(())),
            Some(found) => bail!("{found:?}"),
        }
    })
    .await
    .unwrap();
}

async fn values_reach_their_targets_and_loss_changes_nothing(mode: Mode) -> TestResult {
    let chart = ServedChart::small("{replicaCount: 0, message: file}").await?;
    let (home, edge) = home_and_edge("values", Parts::WithControllers).await?;
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    let options = |extra_flags: &[&str]| {
        HubOptions::new(home.kubeconfig())
            .args(chart.flags(extra_flags))
            .args(["--chart-values-from=configmap/fleet,secret/fleet-secret,configmap/perhaps?"])
    };
    home.apply(&config_map("fleet", "values.yaml", "message: map"))
        .await?;
    let mut hub = Hub::start(&options(&[]))?;
    let mut member = Membership::join(mode, &mut hub, &home, &edge, EDGE).await?;
    let on_home = Release::new("acme", HOME, &fleet_client);
    let on_edge = Release::new("acme", EDGE, &at_edge);

    // The values never existed: nothing is installed, and all conditions report the cause.
    for name in [HOME, EDGE] {
        fleet_client.wait_for_member(name, &[MISSING]).await?;
    }
    let message = fleet_client.event_message(SECRET, MISSING.2).await?;
    assert_contains!(message, SECRET, "optional");
    for client in [&fleet_client, &at_edge] {
        assert!(client.releases().await?.is_empty());
    }

    // The Secret overrides the ConfigMap, which overrides the file. An optional source may be missing.
    write_secret(&fleet_client, "message: secret-one").await;
    for client in [&fleet_client, &at_edge] {
        client.install("acme").await?;
    }
    for release in [&on_home, &on_edge] {
        release.wait_with_message("acme", 1, "secret-one").await;
    }
    for name in [HOME, EDGE] {
        wait_for_no_values_condition(&fleet_client, name).await;
    }
    write_secret(&fleet_client, "message: secret-two").await;
    for release in [&on_home, &on_edge] {
        release.wait_with_message("acme", 2, "secret-two").await;
    }

    // The member's values.
    let values = json!({"values": {"message": "mine"}});
    fleet_client.patch_member(EDGE, values).await?;
    on_edge.wait_with_message("acme", 3, "mine").await;
    fleet_client.wait_for_member(EDGE, &[RESOLVED]).await?;
    let own = json!({"kind": "ConfigMap", "name": "own", "valuesKey": "k"});
    let patch = json!({"values": null, "valuesFrom": [own]});
    fleet_client.patch_member(EDGE, patch).await?;
    fleet_client.wait_for_member(EDGE, &[MISSING]).await?;
    fleet_client.event_message(EDGE, "ValuesUnresolved").await?;
    // An invalid source affects no other member, and removes nothing.
    write_secret(&fleet_client, "message: secret-three").await;
    on_home.wait_with_message("acme", 3, "secret-three").await;
    on_edge.wait_with_message("acme", 3, "mine").await;
    home.apply(&config_map("own", "k", "message: own")).await?;
    on_edge.wait_with_message("acme", 4, "own").await;
    fleet_client.wait_for_member(EDGE, &[RESOLVED]).await?;

    // The Secret is lost: a change of the file and a restart change nothing either.
    let releases = async || {
        let (home, edge) = (fleet_client.releases().await, at_edge.releases().await);
        (home.unwrap(), edge.unwrap())
    };
    let before = releases().await;
    delete_secret(&fleet_client).await;
    for name in [HOME, EDGE] {
        fleet_client.wait_for_member(name, &[MISSING]).await?;
    }
    chart.write("{replicaCount: 0, message: file, image: krypton.test/small:2}")?;
    fleet_client.wait_for_renewal().await?;
    hub.stop().await?;
    let next = options(&["--tenant-values"]).on_port_of(&hub);
    hub = Hub::start_ready(&next).await?;
    for client in [&fleet_client, &at_edge] {
        client
            .annotate("acme", "example.org/touched", "true")
            .await?;
    }
    hub.wait_for_log("members keep their current state").await?;
    assert_eq!(releases().await, before);
    write_secret(&fleet_client, "message: secret-four").await;
    on_home.wait_with_message("acme", 4, "secret-four").await;
    on_edge.wait_with_message("acme", 5, "own").await;
    wait_for_no_values_condition(&fleet_client, HOME).await;
    fleet_client.wait_for_member(EDGE, &[RESOLVED]).await?;

    // The Tenant's values override all others, and affect only this Tenant.
    at_edge
        .create("beta", json!({"values": {"message": "beta's"}}))
        .await?;
    let beta = Release::new("beta", EDGE, &at_edge);
    beta.wait_with_message("beta", 1, "beta's").await;
    on_edge.wait_with_message("acme", 5, "own").await;
    let none = json!({"values": null, "valuesFrom": null});
    fleet_client.patch_member(EDGE, none).await?;
    on_edge.wait_with_message("acme", 6, "secret-four").await;
    wait_for_no_values_condition(&fleet_client, EDGE).await;

    // If Tenant values are disabled, a Tenant with values stays unchanged and reports it.
    hub.stop().await?;
    hub = Hub::start(&options(&[]).on_port_of(&hub))?;
    let (error, ready) = (
        format!("ClusterError/{EDGE}"),
        format!("ClusterReady/{EDGE}"),
    );
    let refused = [
        (error.as_str(), "True", "ValuesNotAllowed"),
        (ready.as_str(), "True", "Installed"),
    ];
    at_edge.wait_for("beta", &refused).await?;
    write_secret(&fleet_client, "message: secret-five").await;
    on_edge.wait_with_message("acme", 7, "secret-five").await;
    let revisions = at_edge.revisions("beta", &beta.name).await?;
    assert_eq!(revisions.last().unwrap().1, "deployed");
    let newest = revisions.last().unwrap().0;
    beta.wait_with_message("beta", newest, "beta's").await;
    let tenants = at_edge.tenants();
    tenants
        .merge("beta", &json!({"spec": {"values": null}}))
        .await?;
    beta.wait_with_message("beta", newest + 1, "secret-five")
        .await;
    at_edge.wait_ready("beta").await?;
    if let Some(agent) = member.agent() {
        agent.stop().await?;
    }
    hub.stop().await?;
    Ok(())
}

/// Returns Helm's result for these layers of values, over the chart's own ones.
async fn rendered(folder: &TempDir, values_json: &Value, layers: &[&Value]) -> Result<Value> {
    let chart = folder.path().join("chart");
    let (values_json, template) = (values_json.to_string(), "values: {{ .Values | toJson }}\n");
    let files = [
        ("values.yaml", values_json.as_str()),
        ("templates/all.yaml", template),
    ];
    ChartSource::write(&chart, "all", &files)?;
    let mut helm = Invocation::new(Tools::find()?.binary("helm"))
        .env("HOME", folder.path())
        .args(["template", "x"])
        .arg(&chart);
    for (number, layer) in layers.iter().enumerate() {
        let file = folder.path().join(format!("{number}.json"));
        std::fs::write(&file, layer.to_string())?;
        helm = helm.arg("--values").arg(&file);
    }
    let output = helm.output(STEP_DEADLINE).await?;
    let read: Value = serde_saphyr::from_str(&output)?;
    Ok(read["values"].clone())
}

fn to_map(value: &Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

#[tokio::test]
async fn value_layers_merge_as_in_helm() -> TestResult {
    let folder = TempDir::with_prefix("krypton-merge-")?;
    let own_values = json!({
        "a": {"x": 1, "deep": {"one": 1, "two": 2}}, "list": [1, 2], "text": "own", "gone": "own",
    });
    let cases = [
        [json!({}), json!({}), json!({})],
        [
            json!({"a": {"x": 2}}),
            json!({"a": {"y": 3}}),
            json!({"a": {"deep": {"two": 3}}}),
        ],
        [
            json!({"list": [3]}),
            json!({"list": []}),
            json!({"text": 5}),
        ],
        [json!({"gone": null}), json!({"a": null}), json!({})],
        [json!({"gone": null}), json!({"gone": "back"}), json!({})],
        [
            json!({"a": {"x": null}}),
            json!({"a": {"y": 1}}),
            json!({"a": {"deep": {"one": null}}}),
        ],
        [
            json!({"new": {"k": 1}}),
            json!({"new": null}),
            json!({"new": {"l": 2}}),
        ],
        [
            json!({"text": {"was": "text"}}),
            json!({"text": "again"}),
            json!({"list": null}),
        ],
        [
            json!({"n": {"k": null}}),
            json!({"n": {"l": {}}}),
            json!({"n": {"l": {"m": [null, {}]}}}),
        ],
    ];
    for layers in cases {
        let mut merged = Map::new();
        for layer in &layers {
            merge(&mut merged, &to_map(layer));
        }
        let layers: Vec<&Value> = layers.iter().collect();
        let one_by_one = rendered(&folder, &own_values, &layers).await?;
        let merged = Value::Object(merged);
        let at_once = rendered(&folder, &own_values, &[&merged]).await?;
        assert_eq!(at_once, one_by_one, "{layers:?} became {merged}");
    }
    Ok(())
}
