//! Runs the comparison with Helm against an API server that is already running. The end-to-end tests start one.

#![cfg(feature = "table")]

use krypton_sim_helm::table::{Plane, cases, compare};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Needs `HELM`, `TABLE_KUBECONFIG` and `TABLE_PREFIX`. `TABLE_CASE` selects cases.
#[tokio::test]
#[ignore = "needs an API server"]
async fn model_leaves_what_helm_leaves() {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let kubeconfig = Kubeconfig::read_from(variable("TABLE_KUBECONFIG")).unwrap();
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options);
    let plane = Plane {
        client: Client::try_from(config.await.unwrap()).unwrap(),
        helm: variable("HELM").into(),
        prefix: variable("TABLE_PREFIX"),
    };
    let mut wrong = Vec::new();
    for case in cases::all() {
        if case.name.contains(&variable("TABLE_CASE")) {
            wrong.extend(compare(&plane, &case).await.err());
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
