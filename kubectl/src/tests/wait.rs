//! Waits for an object of a cluster that does not always respond.

use std::time::Duration;

use kube::api::DynamicObject;

use super::*;
use crate::home::{Target, TargetArgs};

/// Waits until the member exists.
async fn wait_for_member(
    server: &FakeApiServer,
    deadline: Duration,
) -> Result<Option<DynamicObject>, KubectlError> {
    let env = |_: &str| -> Option<String> { None };
    let target = Target {
        args: TargetArgs {
            kubeconfig: Some(server.directory.path().join("config")),
            ..TargetArgs::default()
        },
        env: &env,
    };
    let home = target.connect().await?;
    let members = home.members();
    let times = (Duration::from_millis(1), deadline);
    members.wait_for("edge-1", times, Ok).await
}

fn unavailable() -> (u16, Value) {
    failure(503, "ServiceUnavailable", "no etcd")
}

#[tokio::test]
async fn wait_continues_after_failed_read() {
    let throttled = failure(429, "TooManyRequests", "slow down");
    let member = (200, cluster("edge-1", json!({}), json!({})));
    let server = FakeApiServer::with_responses(vec![unavailable(), throttled, member]).await;
    let found = wait_for_member(&server, Duration::from_secs(60)).await;
    assert!(found.unwrap().is_some());

    let forbidden = failure(403, "Forbidden", "no");
    let server = FakeApiServer::with_responses(vec![forbidden]).await;
    let error = wait_for_member(&server, Duration::from_secs(60)).await;
    assert_eq!(error.unwrap_err().code(), Some(403));
}

#[tokio::test]
async fn wait_ends_with_its_last_failure() {
    let server = FakeApiServer::with_handler(|_| json_response(unavailable())).await;
    let error = wait_for_member(&server, Duration::from_secs(2)).await;
    assert_eq!(error.unwrap_err().code(), Some(503));
}
