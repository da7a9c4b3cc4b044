//! Verifies the guarantees of the harness that other test suites depend on.

use std::{fs, path::Path, time::Duration};

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use krypton_tests::{
    AnsweringProxy, Cluster, FalseResponse, Parts, ResponseFault, ServiceAccountAccess, TestResult,
    Tools,
    answering_proxy::ALL_VERBS,
    assert_contains, eventually_within,
    process::{ChildProcess, Invocation},
};
use kube::{
    Api, Client, Config,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use rustix::process::Signal;

const MINUTE: Duration = Duration::from_secs(60);

/// Returns processes whose command line contains `text`. Zombies have an empty command line, so they don't match.
fn processes_with(text: &str) -> Vec<String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let lines = entries.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(text)).collect()
}

#[tokio::test]
async fn rotated_token_is_rejected_and_next_one_accepted() -> TestResult {
    let cluster = Cluster::start("tokens", Parts::ControlPlane).await?;
    let (first, second) = (
        cluster.kubeconfig_with_token(),
        cluster.kubeconfig_with_next_token(),
    );
    assert_eq!(response_code(&first).await?, 200);
    assert_eq!(response_code(&second).await?, 200);

    cluster.rotate_token().await?;

    assert_eq!(response_code(&first).await?, 401);
    assert_eq!(response_code(&second).await?, 200);
    assert_eq!(cluster.kubeconfig_with_token(), second);
    let next = cluster.kubeconfig_with_next_token();
    assert_eq!(response_code(&next).await?, 200);
    Ok(())
}

/// Returns the HTTP status of a request that lists Secrets with this kubeconfig.
async fn response_code(kubeconfig: &str) -> Result<u16> {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let secrets: Api<Secret> = Api::namespaced(Client::try_from(config)?, "default");
    match secrets.list_metadata(&ListParams::default()).await {
        Ok(_) => Ok(200),
        Err(kube::Error::Api(status)) => Ok(status.code),
        Err(error) => Err(error.into()),
    }
}

#[tokio::test]
async fn denied_requests_are_recorded_and_revoked_token_rejected() -> TestResult {
    let cluster = Cluster::start_audited("audit", Parts::ControlPlane).await?;
    cluster
        .kubectl_line("create serviceaccount limited")
        .await?;
    let mut access = ServiceAccountAccess::new(&cluster, "default", "limited").await?;
    let user = [access.username()];
    let with_token = fs::read_to_string(access.token_file())?;
    let first = cluster.kubeconfig_with(&with_token);
    assert!(cluster.denied_requests(&user).await?.is_empty());

    let by_file = fs::read_to_string(access.kubeconfig())?;
    assert_eq!(response_code(&by_file).await?, 403);
    let denied = cluster.denied_requests(&user).await?;
    let [request] = &denied[..] else {
        panic!("{denied:?}");
    };
    let denied_access = (request.verb.as_str(), request.object.resource.as_str());
    assert_eq!(denied_access, ("list", "secrets"), "{request}");
    let other = ["system:serviceaccount:default:other".to_owned()];
    assert!(cluster.denied_requests(&other).await?.is_empty());

    let former = access.renew(&cluster).await?;
    assert_eq!(response_code(&first).await?, 403);
    access.revoke(&cluster, former).await?;
    eventually_within("the old token to be rejected", MINUTE, async || {
        Ok((response_code(&first).await? == 401).then_some(()))
    })
    .await?;
    assert_eq!(response_code(&by_file).await?, 403);

    // Requests that are denied to an impersonated user, and requests that are allowed.
    let role = "create clusterrole pods --verb=list --resource=pods";
    cluster.kubectl_line(role).await?;
    let bind = "create clusterrolebinding pods --clusterrole=pods --user=someone";
    cluster.kubectl_line(bind).await?;
    eventually_within("one user to be accepted", MINUTE, async || {
        cluster
            .kubectl_line("get pods --as=someone")
            .await
            .map(Some)
    })
    .await?;
    let get = "get secrets --as=someone";
    cluster.kubectl_line(get).await.unwrap_err();
    let denied = cluster.denied_requests(&["someone".to_owned()]).await?;
    let last = denied.last().unwrap();
    assert_eq!(last.object.resource, "secrets", "{last}");
    assert_eq!(last.user.username, "admin", "{last}");
    Ok(())
}

/// Reads ConfigMaps through a proxy in three ways. Returns the number of objects from each.
async fn read_through_proxy(kubeconfig: &Path) -> Result<[usize; 3]> {
    let config = Kubeconfig::read_from(kubeconfig)?;
    let mut config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    let maps: Api<ConfigMap> = Api::namespaced(Client::try_from(config)?, "default");
    let params = ListParams::default().limit(1);
    let [full, metadata] = [
        maps.list(&params).await?.items.len(),
        maps.list_metadata(&params).await?.items.len(),
    ];
    let one = usize::from(maps.get_opt("mine").await?.is_some());
    Ok([full, metadata, one])
}

#[tokio::test]
async fn proxy_returns_injected_answers_until_reset() -> TestResult {
    let cluster = Cluster::start("answers", Parts::ControlPlane).await?;
    cluster.kubectl(["create", "configmap", "mine"]).await?;
    let proxy = AnsweringProxy::start(&cluster).await?;
    let kubeconfig = proxy.kubeconfig();
    assert_eq!(read_through_proxy(&kubeconfig).await?, [1, 1, 1]);
    let fault = |response| ResponseFault {
        verbs: ALL_VERBS,
        resources: &["configmaps"],
        response,
    };
    proxy.inject(fault(FalseResponse::Nothing));
    assert_eq!(read_through_proxy(&kubeconfig).await?, [0, 0, 1]);
    assert_eq!(proxy.false_responses(), 2);
    for code in [403, 404, 410, 429, 500, 503] {
        proxy.inject(fault(FalseResponse::Status(code)));
        match read_through_proxy(&kubeconfig)
            .await
            .unwrap_err()
            .downcast()?
        {
            kube::Error::Api(status) => assert_eq!(status.code, code),
            other => panic!("{other}"),
        }
    }
    for code in [200, 502] {
        proxy.inject(fault(FalseResponse::Page(code)));
        read_through_proxy(&kubeconfig).await.unwrap_err();
        assert_eq!(proxy.false_responses(), 1);
    }
    proxy.forward_all();
    assert_eq!(read_through_proxy(&kubeconfig).await?, [1, 1, 1]);
    Ok(())
}

#[tokio::test]
async fn nothing_is_left_of_a_dropped_cluster() -> TestResult {
    let cluster = Cluster::start_own("dropped", Parts::WithPods).await?;
    let folder = cluster.folder().to_owned();
    let pids = cluster.pids();
    assert_eq!(pids.len(), 5);
    for pid in &pids {
        assert!(
            Path::new(&format!("/proc/{pid}")).exists(),
            "process {pid} does not run"
        );
    }

    drop(cluster);

    for pid in pids {
        assert!(
            !Path::new(&format!("/proc/{pid}")).exists(),
            "process {pid} is left"
        );
    }
    eventually_within(
        "no process of the cluster to be left",
        MINUTE,
        async || match processes_with(&folder.display().to_string()) {
            left if left.is_empty() => Ok(Some(())),
            left => bail!("{left:?}"),
        },
    )
    .await?;
    assert!(!folder.exists());
    Ok(())
}

/// The child process of the test below, which runs this executable again. The test must kill a separate process to
/// check its children.
#[tokio::test]
#[ignore = "started by children_end_when_their_owner_is_killed"]
async fn owner_of_a_child() -> Result<()> {
    let Ok(folder) = std::env::var("OWNER_FOLDER") else {
        return Ok(());
    };
    let folder = Path::new(&folder);
    let child = Invocation::new("/bin/sh")
        .args(["-c", "sleep 3600 & wait", "child"])
        .arg(folder);
    let mut child = ChildProcess::spawn("child", &child, &folder.join("child.log"))?;
    child.wait(60 * MINUTE).await.map(drop)
}

#[tokio::test]
async fn children_end_when_their_owner_is_killed() -> TestResult {
    let folder = tempfile::tempdir()?;
    let mark = format!("child {}", folder.path().display());
    let owner = Invocation::new(std::env::current_exe()?)
        .args(["--exact", "harness::owner_of_a_child", "--ignored"])
        .env("OWNER_FOLDER", folder.path());
    let mut owner = ChildProcess::spawn("owner", &owner, &folder.path().join("owner.log"))?;
    eventually_within("the child to run", MINUTE, async || {
        owner.check_running()?;
        Ok((!processes_with(&mark).is_empty()).then_some(()))
    })
    .await?;

    owner.signal(Signal::KILL)?;
    owner.wait(MINUTE).await?;

    eventually_within("the child to end", MINUTE, async || {
        match processes_with(&mark) {
            left if left.is_empty() => Ok(Some(())),
            left => bail!("{left:?}"),
        }
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn timeout_error_shows_last_state() {
    let mut looks = 0;
    let missed = eventually_within::<()>("the answer", Duration::from_millis(200), async || {
        looks += 1;
        bail!("check {looks}: phase is Pending")
    })
    .await
    .expect_err("never answered");
    let message = format!("{missed:#}");
    assert_contains!(message, "the answer", "phase is Pending");
    assert!(looks > 1);
}

#[tokio::test]
async fn ended_process_is_reported_with_log() -> TestResult {
    let folder = tempfile::tempdir()?;
    let etcd = Invocation::new(Tools::find()?.binary("etcd")).arg("--no-such-flag");
    let mut process = ChildProcess::spawn("etcd", &etcd, &folder.path().join("log"))?;
    let status = process.wait(MINUTE).await?;
    assert!(!status.success());
    let message = format!("{:#}", process.check_running().expect_err("it has ended"));
    assert_contains!(message, "no-such-flag");
    Ok(())
}
