//! Compares the simulated Helm with Helm.

use krypton_sim_helm::table::{Plane, cases, compare};
use krypton_tests::{Cluster, Parts, TestResult, Tools};

/// Number of parts that run at the same time, each on its own control plane.
const PARTS: usize = 3;

async fn compare_part(part: usize) -> TestResult {
    let name = format!("helm-model-{part}");
    let cluster = Cluster::start(&name, Parts::WithControllers).await?;
    let plane = Plane {
        client: cluster.client(),
        helm: Tools::find()?.binary("helm"),
        prefix: "table".to_owned(),
    };
    let all = cases::all();
    assert!(all.len() >= 25, "only {} cases", all.len());
    let mut wrong = Vec::new();
    for case in all.iter().skip(part).step_by(PARTS) {
        wrong.extend(compare(&plane, case).await.err());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    Ok(())
}

#[tokio::test]
async fn simulated_helm_equals_helm_part_1() -> TestResult {
    compare_part(0).await
}

#[tokio::test]
async fn simulated_helm_equals_helm_part_2() -> TestResult {
    compare_part(1).await
}

#[tokio::test]
async fn simulated_helm_equals_helm_part_3() -> TestResult {
    compare_part(2).await
}
