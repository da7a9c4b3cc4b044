//! Shows that Krypton fetches charts from a real OCI registry by tag, range and digest, with and without a login, and
//! for a fleet.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use krypton_helm::chart::{ChartCache, ChartProblem, ChartRef, Credentials, CurrentCredentials};
use krypton_helm::driver::{Helm, HelmConfig, Keyring, Supervisor};
use krypton_hub::args::HelmCredentials;
use krypton_hub::chart::helm_credentials;
use krypton_tests::fleet::{FleetClient, ValuesFile, values_flag};
use krypton_tests::registry::{Login, PASSWORD, USERNAME};
use krypton_tests::{
    Agent, ChartRepository, ChartSource, Hub, HubOptions, Membership, Mode, Parts, Registry,
    Signer, TestResult, Tools, by_agent, home_and_edge,
};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;

fn cache() -> (TempDir, ChartCache) {
    // Fails if another test has already installed the provider.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let dir = tempfile::tempdir().unwrap();
    let cache = ChartCache::new(dir.path().join("charts")).unwrap();
    (dir, cache)
}

fn chart(registry: &Registry, version: &str) -> ChartRef {
    ChartRef {
        repo: registry.url(),
        name: "small".to_owned(),
        version: version.to_owned(),
    }
}

fn login(username: &str, password: &str) -> watch::Receiver<CurrentCredentials> {
    let data = BTreeMap::from([("username", username), ("password", password)])
        .into_iter()
        .map(|(key, value)| (key.to_owned(), ByteString(value.as_bytes().to_vec())))
        .collect();
    let secret = Secret {
        data: Some(data),
        ..Secret::default()
    };
    let read = Credentials::from_secret(&secret).unwrap();
    watch::channel(Ok(Arc::new(read))).1
}

/// The same login from a file as `helm registry login` writes it.
async fn helm_login(
    registry: &Registry,
    folder: &Path,
) -> TestResult<watch::Receiver<CurrentCredentials>> {
    let url = registry.url();
    let host = url.split('/').nth(2).unwrap();
    let auth = BASE64_STANDARD.encode(format!("{USERNAME}:{PASSWORD}"));
    let config = json!({"auths": {host: {"auth": auth}}});
    let file = folder.join("registry.json");
    std::fs::write(&file, config.to_string())?;
    let read = helm_credentials::read(&HelmCredentials::Registry(file), &url).await?;
    Ok(watch::channel(Ok(Arc::new(read.unwrap()))).1)
}

#[tokio::test]
async fn registry_chart_resolves_by_tag_range_or_digest() -> TestResult {
    let registry = Registry::start(Login::Open).await?;
    // More tags than one page contains.
    for version in ["1.0.0", "1.1.0", "1.2.0-rc.1", "1.2.0+build.7", "2.0.0"] {
        registry.push(&ChartSource::small(version)).await?;
    }
    let pinned = registry.push(&ChartSource::small("1.0.1")).await?;
    let (_dir, cache) = cache();
    for (version, expected) in [
        ("1.0.0", "1.0.0"),
        ("v1.1.0", "1.1.0"),
        ("1.2.0+build.7", "1.2.0+build.7"),
        ("1.2.0-rc.1", "1.2.0-rc.1"),
        ("", "2.0.0"),
        (&format!("1.0.1@{pinned}"), "1.0.1"),
    ] {
        let fetched = cache.fetch(&chart(&registry, version)).await?;
        assert_eq!(
            (fetched.name.as_str(), fetched.version.as_str()),
            ("small", expected),
            "{version}"
        );
        // A version can be pinned by the archive's digest or by the manifest's.
        let again = format!("{expected}@sha256:{}", fetched.sha256);
        let again = cache.fetch(&chart(&registry, &again)).await?;
        assert_eq!(again.sha256, fetched.sha256);
    }
    for (range, expected) in [
        ("^1", "1.2.0+build.7"),
        ("~1.0", "1.0.1"),
        (">1.1.0-0 <1.2.0", "1.2.0-rc.1"),
        ("*", "2.0.0"),
    ] {
        let resolved = cache.resolve(&chart(&registry, range)).await?;
        assert_eq!(resolved, expected, "{range}");
    }
    let full = ChartRef {
        repo: String::new(),
        name: format!("{}/small", registry.url()),
        version: "1.0.0".to_owned(),
    };
    assert_eq!(cache.fetch(&full).await?.name, "small");
    Ok(())
}

#[tokio::test]
async fn missing_registry_chart_and_version_errors_are_distinct() -> TestResult {
    let registry = Registry::start(Login::Open).await?;
    registry.push(&ChartSource::small("1.0.0")).await?;
    let (_dir, cache) = cache();
    let error = cache.fetch(&chart(&registry, "3.0.0")).await.unwrap_err();
    assert_eq!(error.reason(), "VersionNotFound");
    assert!(error.to_string().ends_with("version is 1.0.0"), "{error}");
    let error = cache.resolve(&chart(&registry, "^3")).await.unwrap_err();
    assert_eq!(error.reason(), "VersionNotFound");
    let large = ChartRef {
        name: "large".to_owned(),
        ..chart(&registry, "1.0.0")
    };
    let error = cache.fetch(&large).await.unwrap_err();
    assert!(
        matches!(error.problem, ChartProblem::Refused { status: 404, .. }),
        "{error}"
    );
    Ok(())
}

#[tokio::test]
async fn chart_changed_in_registry_is_rejected() -> TestResult {
    let registry = Registry::start(Login::Open).await?;
    let first = registry.push(&ChartSource::small("1.0.0")).await?;
    let (_dir, cache) = cache();
    // The tag moves to other content.
    let source = ChartSource::small("1.0.0").name("other");
    let other = registry.push(&source).await?;
    assert_ne!(first, other);
    let moved = chart(&registry, &format!("1.0.0@{other}"));
    let error = cache.fetch(&moved).await.unwrap_err();
    assert!(
        matches!(error.problem, ChartProblem::Digest { .. }),
        "{error}"
    );

    // The content doesn't match its digest.
    let fetched = cache.fetch(&chart(&registry, "1.0.0")).await?;
    registry.damage(&fetched.sha256)?;
    let (_dir, fresh) = self::cache();
    let error = fresh.fetch(&chart(&registry, "1.0.0")).await.unwrap_err();
    assert!(
        matches!(error.problem, ChartProblem::Digest { .. }),
        "{error}"
    );
    Ok(())
}

#[tokio::test]
async fn registry_login_works_by_password_and_token() -> TestResult {
    for kind in [Login::Basic, Login::Token] {
        let mut registry = Registry::start(kind).await?;
        registry.push(&ChartSource::small("1.0.0")).await?;
        let before = registry.token_requests().len();
        let request = chart(&registry, "1.0.0");

        let (_dir, open) = cache();
        let error = open.fetch(&request).await.unwrap_err();
        assert!(
            matches!(error.problem, ChartProblem::Refused { status: 401, .. }),
            "{kind:?}: {error}"
        );
        assert!(error.to_string().contains("--chart-credentials-secret"));

        let (_dir, stranger) = cache();
        let stranger = stranger.with_credentials(login(USERNAME, "wrong-hunter2"));
        let error = stranger.fetch(&request).await.unwrap_err();
        assert!(
            matches!(error.problem, ChartProblem::Refused { status: 401, .. }),
            "{kind:?}: {error}"
        );
        assert!(!format!("{error:?}{error}").contains("hunter2"));

        let (_dir, known) = cache();
        let known = known.with_credentials(login(USERNAME, PASSWORD));
        assert_eq!(known.resolve(&chart(&registry, "^1")).await?, "1.0.0");
        assert_eq!(known.fetch(&request).await?.version, "1.0.0");
        let (dir, with_file) = cache();
        let with_file = with_file.with_credentials(helm_login(&registry, dir.path()).await?);
        assert_eq!(with_file.fetch(&request).await?.version, "1.0.0");
        let token_requests = registry.token_requests().split_off(before);
        let expected: &[&str] = match kind {
            Login::Token => &["", USERNAME, USERNAME, USERNAME, USERNAME],
            _ => &[],
        };
        assert_eq!(token_requests, expected, "{kind:?}");

        // A cached chart needs no registry.
        registry.stop();
        assert_eq!(known.fetch(&request).await?.version, "1.0.0");
    }
    Ok(())
}

/// A cache that accepts only charts signed by [`Signer::Signer`].
async fn strict_cache() -> TestResult<(TempDir, ChartCache)> {
    let (dir, cache) = cache();
    let helm = Helm::new(HelmConfig {
        binary: Tools::find()?.binary("helm"),
        processes: Arc::new(Supervisor::new(Agent::program()?, &["helm-run"])),
        scratch: dir.path().join("helm"),
        private: dir.path().join("private"),
        max_concurrent: 1,
        max_per_member: 1,
    });
    let keyring = Keyring {
        helm: Arc::new(helm.await?),
        file: Signer::Signer.keyring(),
    };
    Ok((dir, cache.with_signature_verifier(Arc::new(keyring))))
}

#[tokio::test]
async fn keyring_accepts_only_charts_signed_by_its_keys() -> TestResult {
    let sources = [
        ChartSource::small("1.0.0").signed(Signer::Signer),
        ChartSource::small("1.1.0").signed(Signer::Stranger),
        ChartSource::small("1.2.0"),
        ChartSource::small("1.3.0+build.7").signed(Signer::Signer),
    ];
    let registry = Registry::start(Login::Open).await?;
    for source in &sources {
        registry.push(source).await?;
    }
    let repository = ChartRepository::start(&sources).await?;
    let (_dir, cache) = strict_cache().await?;
    let folder = tempfile::tempdir()?;
    let file = |version: &str| ChartRef {
        repo: String::new(),
        name: format!("{}/small-{version}.tgz", folder.path().display()),
        version: version.to_owned(),
    };
    for (name, bytes) in repository.files() {
        std::fs::write(folder.path().join(name), bytes)?;
    }
    let refs = |version: &str| {
        let by_http = ChartRef {
            repo: repository.url(),
            ..chart(&registry, version)
        };
        [chart(&registry, version), by_http, file(version)]
    };
    for version in ["1.0.0", "1.3.0+build.7"] {
        for chart in refs(version) {
            assert_eq!(cache.fetch(&chart).await?.version, version);
        }
    }
    for (version, reason) in [("1.1.0", "not good"), ("1.2.0", "no provenance file")] {
        for chart in refs(version) {
            let error = cache.fetch(&chart).await.unwrap_err();
            assert!(
                matches!(error.problem, ChartProblem::UnverifiedSignature(_)),
                "{error}"
            );
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
    // A valid signature of other content.
    let [from, to] =
        ["1.0.0", "1.2.0"].map(|version| folder.path().join(format!("small-{version}.tgz.prov")));
    std::fs::copy(from, to)?;
    let (_dir, fresh) = strict_cache().await?;
    let error = fresh.fetch(&file("1.2.0")).await.unwrap_err();
    assert!(error.to_string().contains("not good"), "{error}");
    Ok(())
}

by_agent!(signed_private_chart_range_stays_pinned_across_restart);

async fn signed_private_chart_range_stays_pinned_across_restart(mode: Mode) -> TestResult {
    let registry = Registry::start(Login::Token).await?;
    for version in ["1.0.0", "1.1.0", "2.0.0"] {
        let source = ChartSource::small(version).signed(Signer::Signer);
        registry.push(&source).await?;
    }
    let before = registry.token_requests().len();
    let (home, edge) = home_and_edge("charts", Parts::ControlPlane).await?;
    let secret = json!({
        "type": "kubernetes.io/basic-auth",
        "stringData": {"username": USERNAME, "password": PASSWORD},
    });
    let (fleet_client, at_edge) = (FleetClient::new(&home), FleetClient::new(&edge));
    fleet_client.apply_secret("charts", secret).await?;
    let values = ValuesFile::new("replicaCount: 0")?;
    let url = registry.url();
    let keyring = format!("--chart-keyring={}", Signer::Signer.keyring().display());
    let options = || {
        HubOptions::new(home.kubeconfig())
            .args([keyring.clone()])
            .args([format!("--chart-repo={url}"), values_flag(&values)])
            .args(["--chart-name=small", "--chart-version=^1"])
            .args(["--chart-install-crds=false", "--retry-max=5s"])
            .args(["--chart-credentials-secret=charts", "--self-cluster=false"])
    };
    let mut hub = Hub::start(&options())?;
    let mut member = Membership::join(mode, &mut hub, &home, &edge, "edge-1").await?;
    let tenant = at_edge.install("acme").await?;
    let applied = tenant.status.unwrap().last_applied_chart.unwrap();
    // Every member uses the content that the hub has verified, from any source.
    let pinned = format!("{url}/small:1.1.0@sha256:");
    assert!(applied.starts_with(&pinned), "{applied}");
    // The registry rejected the agent, which has no password, and accepted the hub.
    let token_requests = registry.token_requests().split_off(before);
    for username in ["", USERNAME].map(str::to_owned) {
        assert!(token_requests.contains(&username), "{token_requests:?}");
    }

    // After a restart, the hub keeps its version, although a newer one exists.
    let newer = ChartSource::small("1.2.0").signed(Signer::Signer);
    registry.push(&newer).await?;
    hub.stop().await?;
    let mut hub = Hub::start(&options().on_port_of(&hub))?;
    let later = at_edge.install("later").await?;
    assert_eq!(later.status.unwrap().last_applied_chart, Some(applied));
    let release = "tenant-acme-edge-1";
    let revisions = at_edge.revisions("acme", release).await?;
    assert_eq!(revisions, [(1, "deployed".to_owned())]);
    for log in [hub.log()?, member.actor(&mut hub).log()?] {
        assert!(!log.contains(PASSWORD));
    }
    Ok(())
}
