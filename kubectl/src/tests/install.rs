//! `install`: the join bundle, the values, and the tag that a release keeps.

use std::fs;

use krypton_types::join_bundle::JoinBundle;

use super::join::joinable_server;
use super::*;

/// Creates a Helm program that records its arguments and the join bundle. Its release has this tag.
fn helm_with_tag(server: &FakeApiServer, tag: &str) -> String {
    let script = r#"case "$1" in
get) echo '{"image": {"tag": "TAG"}}' ;;
upgrade)
    echo installed
    echo "$*" >args
    for arg; do case "$arg" in join.bundle=*) cp "${arg#*=}" bundle ;; esac; done ;;
esac"#;
    helm_stub(server, &script.replace("TAG", tag))
}

#[tokio::test]
async fn agent_is_installed_with_bundle_and_values() {
    let server = joinable_server().await;
    let bundle = server.run(&["join", "edge-1"]).await.unwrap().stdout;
    let folder = server.directory.path();
    let file = folder.join("edge-1.yaml");
    fs::write(&file, &bundle).unwrap();
    let helm = helm_with_tag(&server, "");
    let args = [
        "install",
        "agent",
        "--skip-checks",
        "--helm",
        helm.as_str(),
        "--bundle",
        file.to_str().unwrap(),
        "-f=my.yaml",
        "--set=a=1",
        "--set-string=b=2",
        "--set-file=c=file",
    ];
    let output = server.run(&args).await.unwrap();
    assert_eq!(output.stdout, "installed\n");
    assert_eq!(output.stderr, "");
    let args = fs::read_to_string(folder.join("args")).unwrap();
    let expected =
        "--values my.yaml --set a=1 --set-string b=2 --set-file c=file --set-file join.bundle=/";
    assert!(args.contains(expected), "{args}");
    let passed = fs::read_to_string(folder.join("bundle")).unwrap();
    let parse = |text: &str| JoinBundle::parse(text).unwrap();
    assert_eq!(parse(&passed), parse(&bundle));
}

#[tokio::test]
async fn invalid_bundle_starts_no_helm() {
    let server = FakeApiServer::with_responses(Vec::new()).await;
    for (name, expected) in [
        ("config", "/config is not valid: "),
        ("missing", "/missing failed: "),
    ] {
        let file = server.directory.path().join(name);
        let bundle = format!("--bundle={}", file.display());
        let error = server
            .error(&["install", "agent", &bundle, "--helm=/nonexistent"])
            .await;
        assert!(error.contains(expected), "{error}");
    }
    assert!(server.uris().is_empty());
}

#[tokio::test]
async fn other_tag_of_release_is_reported() {
    let cases: [(&str, &[&str], &str); 4] = [
        ("0.0.1", &[], "the release keeps image.tag=0.0.1, and not "),
        ("", &[], ""),
        (env!("CARGO_PKG_VERSION"), &[], ""),
        // The version of the user's own chart is unknown.
        ("0.0.1", &["--chart=own"], ""),
    ];
    for (tag, flags, expected) in cases {
        let server = FakeApiServer::with_responses(Vec::new()).await;
        let helm = helm_with_tag(&server, tag);
        let args = ["install", "hub", "--skip-checks", "--helm", helm.as_str()];
        let output = server.run(&[&args[..], flags].concat()).await.unwrap();
        let stderr = output.stderr;
        assert!(stderr.starts_with(expected), "{tag}: {stderr}");
        assert_eq!(stderr.is_empty(), expected.is_empty(), "{tag}: {stderr}");
    }
}
