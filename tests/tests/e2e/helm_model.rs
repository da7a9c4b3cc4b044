//! Compares the simulated Helm with Helm.

use futures::{StreamExt, stream};
use krypton_sim_helm::table::{Plane, cases, compare};
use krypton_tests::{Cluster, Parts, TestResult, Tools};

/// Cases that run at the same time. Most of a case's time is the start of Helm.
const AT_ONCE: usize = 3;

#[tokio::test]
async fn simulated_helm_leaves_what_helm_leaves() -> TestResult {
    let cluster = Cluster::start("helm-model", Parts::WithControllers).await?;
    let plane = Plane {
        client: cluster.client(),
        helm: Tools::find()?.binary("helm"),
        prefix: "table".to_owned(),
    };
    let cases = cases::all();
    assert!(cases.len() >= 25, "only {} cases", cases.len());
    let compared = stream::iter(&cases)
        .map(|case| compare(&plane, case))
        .buffer_unordered(AT_ONCE);
    let wrong: Vec<String> = compared
        .filter_map(|outcome| async { outcome.err() })
        .collect()
        .await;
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    Ok(())
}
