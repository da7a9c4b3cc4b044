//! Compares a real API server with the recorded transcripts that the simulated one must reproduce.

mod real;

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use k8s_openapi::api::core::v1::ConfigMap;
use krypton_sim_apiserver::conformance::{cases, recorded};
use krypton_tests::{Cluster, Parts, TestResult};
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::runtime::Runtime;

use real::RealServer;

/// The harness of the transcripts is synchronous, so this test has no runtime.
#[test]
fn real_server_answers_as_recorded() -> TestResult {
    let runtime = Runtime::new()?;
    let cluster = runtime.block_on(Cluster::start("conformance", Parts::WithControllers))?;
    let client = runtime.block_on(async { cluster.client() });
    let mut server = RealServer::new(&runtime, client);
    let write = std::env::var_os("WRITE_CONFORMANCE").is_some();
    let before = recorded::read().map_err(|failure| anyhow!(failure))?;
    let mut differing = Vec::new();
    let mut after: BTreeMap<&str, recorded::Topic> = BTreeMap::new();
    for case in cases() {
        let transcript = case.run(&mut server);
        differing.extend(recorded::difference(&case, &before, &transcript));
        after
            .entry(case.topic)
            .or_default()
            .insert(case.name.to_owned(), transcript);
    }
    if write {
        for (topic, transcripts) in after {
            recorded::write(topic, &transcripts).map_err(|failure| anyhow!(failure))?;
        }
        return Ok(());
    }
    let count = differing.len();
    assert!(
        differing.is_empty(),
        "{}\n{count} cases differ; if the difference is intended, rewrite the transcripts with \
         WRITE_CONFORMANCE=1",
        differing.join("\n")
    );
    Ok(())
}

#[tokio::test]
async fn kube_client_performs_main_verbs() -> TestResult {
    let cluster = Cluster::start("conformance", Parts::ControlPlane).await?;
    let api: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let new = serde_json::from_value(json!({"metadata": {"name": "one"}, "data": {"a": "1"}}))?;
    let created = api.create(&PostParams::default(), &new).await?;
    expect_code(api.create(&PostParams::default(), &new).await, 409)?;
    let mut next = api.get("one").await?;
    assert!(next == created, "{next:?}");
    next.data = Some([("a".to_owned(), "2".to_owned())].into());
    api.replace("one", &PostParams::default(), &next).await?;
    expect_code(api.replace("one", &PostParams::default(), &next).await, 409)?;
    let patch = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    api.patch_metadata("one", &PatchParams::default(), &patch)
        .await?;
    let params = PatchParams::apply("other");
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"a": "3"}
    });
    expect_code(api.patch("one", &params, &Patch::Apply(&object)).await, 409)?;
    api.patch("one", &params.force(), &Patch::Apply(&object))
        .await?;
    let list = api
        .list_metadata(&ListParams::default().labels("a=b"))
        .await?;
    assert!(list.items.len() == 1, "{list:?}");
    api.delete("one", &DeleteParams::default()).await?;
    assert!(api.get_metadata_opt("one").await?.is_none());
    Ok(())
}

fn expect_code<T>(response: kube::Result<T>, code: u16) -> Result<()> {
    match response {
        Err(kube::Error::Api(status)) if status.code == code => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(anyhow!(
            "the API server accepted the request instead of returning {code}"
        )),
    }
}
