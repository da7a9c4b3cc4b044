//! Verifies that keys, tokens and fleet values are only in their Secrets, after success and failure. Searches logs at
//! trace level, events, objects, command lines and environments.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::bail;
use k8s_openapi::api::core::v1::Secret;
use krypton_agent::credentials::renewal::renew;
use krypton_agent::credentials::store::{Store, StoredIdentity};
use krypton_agent::session::Link;
use krypton_agent::session::connect::Dialer;
use krypton_tests::canary::{Canary, search};
use krypton_tests::{
    Agent, AgentOptions, ChartRepository, ChartSource, Cluster, Daemon, Hub, HubOptions, Mode,
    Parts, STEP_DEADLINE, TestResult, eventually,
    fleet::{
        CONNECTED, FleetClient, SYSTEM_NAMESPACE, ValuesFile, chart_flags, condition, values_flag,
    },
    join_bundle, kubectl_krypton,
};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;

/// Interval between two checks of this machine's processes.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);

/// Returns a support bundle of the cluster, created by a user who may read everything, including this debug port.
async fn support_bundle(
    cluster: &Cluster,
    process: Option<&Daemon>,
) -> TestResult<Vec<(String, Vec<u8>)>> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("bundle.tar.gz");
    let debug_address =
        process.map(|process| format!("--debug-address={}", process.debug_address()));
    let mut args = vec!["support-bundle", "--file", file.to_str().unwrap()];
    args.extend(debug_address.as_deref());
    kubectl_krypton(cluster, &args).await?;
    let packed = fs::File::open(&file)?;
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(packed));
    let mut files = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.display().to_string();
        let mut content = Vec::new();
        entry.read_to_end(&mut content)?;
        files.push((format!("{name} of {}", cluster.name()), content));
    }
    assert!(files.len() > 5, "{} files", files.len());
    let dumps = files.iter().filter(|(name, _)| name.contains("/debug/"));
    assert_eq!(dumps.count(), process.into_iter().count());
    Ok(files)
}

/// Command lines and environments of all processes so far, and files of hub and agent that others can read.
#[derive(Default)]
struct Observations {
    lines: BTreeSet<Vec<u8>>,
    /// Files with a secret that others can read.
    open: BTreeSet<PathBuf>,
    /// Files with a secret that only their owner can read.
    closed: BTreeSet<PathBuf>,
}

struct ProcessWatcher {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Observations>,
}

impl ProcessWatcher {
    /// Watches processes, and searches the files below `folders` for these secrets.
    fn start(folders: Vec<PathBuf>, secrets: Vec<Canary>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut observations = Observations::default();
            while !stopped.load(Ordering::Relaxed) {
                for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
                    for file in ["cmdline", "environ"] {
                        if let Ok(line) = fs::read(entry.path().join(file)) {
                            observations.lines.insert(line);
                        }
                    }
                }
                for folder in &folders {
                    search_folder(folder, &secrets, &mut observations);
                }
                std::thread::sleep(SAMPLE_INTERVAL);
            }
            observations
        });
        Self { stop, thread }
    }

    fn end(self) -> Observations {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn search_folder(folder: &Path, secrets: &[Canary], observations: &mut Observations) {
    // The file may be gone.
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(about) = fs::symlink_metadata(&path) else {
            continue;
        };
        if about.is_dir() {
            search_folder(&path, secrets, observations);
        } else if about.is_file() && about.len() < 64 * 1024 && !path.ends_with("log") {
            let Ok(content) = fs::read(&path) else {
                continue;
            };
            if !search(secrets, [("", content.as_slice())]).is_empty() {
                match about.permissions().mode() & 0o077 {
                    0 => observations.closed.insert(path),
                    _ => observations.open.insert(path),
                };
            }
        }
    }
}

/// Returns all objects that a user without access to Secrets can read.
async fn readable_objects(cluster: &Cluster, more: &str) -> String {
    let kinds = format!(
        "events,configmaps,leases,tenants,deployments,namespaces,serviceaccounts,pods,jobs{more}"
    );
    let known = cluster.kubectl_line("api-resources -o name").await;
    let known = known.unwrap();
    let known: BTreeSet<&str> = known
        .lines()
        .map(|kind| kind.split('.').next().unwrap_or_default())
        .collect();
    let unknown: Vec<&str> = kinds
        .split(',')
        .filter(|kind| !known.contains(kind))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?} of {}", cluster.name());
    let args = ["get", &kinds, "-A", "-o", "json", "--show-managed-fields"];
    cluster.kubectl(args).await.unwrap()
}

/// Returns the Secrets that contain this canary, as namespace/name.
async fn secrets_with(cluster: &Cluster, canary: &Canary) -> BTreeSet<String> {
    let secrets: Api<Secret> = Api::all(cluster.client());
    let all = secrets.list(&ListParams::default()).await.unwrap().items;
    let holds = |secret: &Secret| {
        let data = secret.data.iter().flatten();
        data.into_iter()
            .any(|(_, value)| canary.find_in(&value.0).is_some())
    };
    let identify = |secret: &Secret| {
        format!(
            "{}/{}",
            secret.namespace().unwrap_or_default(),
            secret.name_any()
        )
    };
    all.iter()
        .filter(|secret| holds(secret))
        .map(identify)
        .collect()
}

fn key_canary(kept: &StoredIdentity) -> Canary {
    Canary::key("the agent's key", &kept.identity.key.serialize_pem())
}

async fn secret_text(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
    key: &str,
) -> TestResult<String> {
    let secrets: Api<Secret> = Api::namespaced(cluster.client(), namespace);
    let secret = secrets.get(name).await?;
    Ok(String::from_utf8(secret.data.unwrap()[key].0.clone())?)
}

#[tokio::test]
#[expect(
    clippy::too_many_lines,
    reason = "one life of a fleet, from its beginning to its end"
)]
async fn keys_tokens_and_values_stay_in_their_secrets() -> TestResult {
    let versions = [ChartSource::small("1.0.0")];
    let repository = ChartRepository::start(&versions).await?;
    let (home, one, two) = tokio::try_join!(
        Cluster::start("leaks-home", Parts::ControlPlane),
        Cluster::start("leaks-1", Parts::WithControllers),
        Cluster::start("leaks-2", Parts::WithControllers),
    )?;
    let (fleet_client, at_one, at_two) = (
        FleetClient::new(&home),
        FleetClient::new(&one),
        FleetClient::new(&two),
    );
    let value = |number: u8| format!("canary-{number}-of-the-values-{}", "k".repeat(9));
    let content = |number: u8| format!("replicaCount: 0\nhidden: {}\n", value(number));
    let values = ValuesFile::new(&content(1))?;
    let key = "canary-of-the-repository-key";
    let chart = chart_flags(&repository, "small", "1.0.0").into_iter();
    let chart = chart.map(|flag| match flag.starts_with("--chart-repo=") {
        true => format!("{flag}?key={key}"),
        false => flag,
    });
    let options = HubOptions::new(home.kubeconfig())
        .args(chart)
        .args([values_flag(&values)])
        .args([
            "--self-cluster=false",
            "--chart-values-from=secret/fleet-values?",
        ])
        .env("RUST_LOG", "trace");
    let hub = Hub::start_ready(&options).await?;
    let folder = TempDir::with_prefix("krypton-leaks-")?;
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let trace = || [("RUST_LOG".to_owned(), "trace".to_owned())];

    // One agent joins, and two are rejected.
    let valid_bundle = join_bundle(&home, "edge-1").await?;
    let read: Value = serde_saphyr::from_str(&valid_bundle)?;
    let token = read["token"].as_str().unwrap().to_owned();
    let (public, secret) = token.split_once('.').unwrap();
    let guessed_token_file = file("guess.yaml", &valid_bundle.replace(secret, &"0".repeat(64)));
    let valid_bundle = file("good.yaml", &valid_bundle);
    let start_agent = |path: &Path, namespace: &str| {
        let args = [format!("--namespace={namespace}")];
        let options = AgentOptions::new(one.kubeconfig())
            .join_file(path)
            .args(args);
        Agent::start(&options.env(trace())).unwrap()
    };
    let mut agent = start_agent(&valid_bundle, SYSTEM_NAMESPACE);
    agent.wait_ready(STEP_DEADLINE).await?;
    let mut refused = Vec::new();
    for (path, namespace) in [(&valid_bundle, "second"), (&guessed_token_file, "third")] {
        let mut agent = start_agent(path, namespace);
        agent.wait(STEP_DEADLINE).await?;
        refused.push(agent);
    }
    let log = hub.log()?;
    assert!(log.contains(public), "the public part of a token is shown");

    // The secrets to search for.
    let ca = secret_text(&home, "default", "krypton-hub-ca", "ca.key").await?;
    let store = Store::new(one.client(), SYSTEM_NAMESPACE.to_owned());
    let stored_identity = store.read().await?.unwrap();
    let client_key = |cluster: &Cluster| {
        let kubeconfig: Value =
            serde_saphyr::from_str(&fs::read_to_string(cluster.kubeconfig()).unwrap()).unwrap();
        let text = kubeconfig["users"][0]["user"]["client-key-data"].as_str();
        let decoded = base64::Engine::decode(&base64::prelude::BASE64_STANDARD, text.unwrap());
        String::from_utf8(decoded.unwrap()).unwrap()
    };
    let bearer = |kubeconfig: &str| {
        let kubeconfig: Value = serde_saphyr::from_str(kubeconfig).unwrap();
        let token = kubeconfig["users"][0]["user"]["token"].as_str();
        token.unwrap().to_owned()
    };
    let with_token = two.kubeconfig_with_token();
    let wrong_token = "canary-of-a-wrong-bearer-token";
    let mut canaries = vec![
        Canary::key("the CA's key", &ca),
        key_canary(&stored_identity),
        Canary::key("the client key of home", &client_key(&home)),
        Canary::key("the client key of edge-1", &client_key(&one)),
        Canary::key("the client key of edge-2", &client_key(&two)),
        Canary::text("the bearer token of edge-2", &bearer(&with_token)),
        Canary::text("a wrong bearer token", wrong_token),
        Canary::text("the join token's secret", secret),
        Canary::text("a chart value", &value(1)),
        Canary::text("the next chart value", &value(2)),
        Canary::text("the value that fails", &value(3)),
        Canary::text("the value that helm quotes", &value(4)),
        Canary::text("the key of the repository", key),
    ];
    let folders = [hub.log_path(), agent.log_path()];
    let folders = folders.map(|log| log.parent().unwrap().to_owned());
    let watcher = ProcessWatcher::start(folders.to_vec(), canaries.clone());

    // A member with a kubeconfig: first with a client certificate, then with a token, and then invalid ones.
    fleet_client
        .add_member("edge-2", &fs::read_to_string(two.kubeconfig())?)
        .await?;
    for at_edge in [&at_one, &at_two] {
        at_edge.install("acme").await?;
    }
    fleet_client.add_member("edge-2", &with_token).await?;
    let exec = two.kubeconfig_with(wrong_token).replace(
        "token:",
        "exec: {apiVersion: client.authentication.k8s.io/v1, command: x, interactiveMode: Never}\n    token:",
    );
    let broken = format!("{}\n  users: [", two.kubeconfig_with(wrong_token));
    let no_key = two.kubeconfig_with(wrong_token).replace(
        &format!("token: {wrong_token}"),
        &format!("client-certificate-data: {wrong_token}\n    client-key-data: {wrong_token}"),
    );
    for (name, kubeconfig) in [("exec", exec), ("broken", broken), ("no-key", no_key)] {
        fleet_client.add_member(name, &kubeconfig).await?;
        let invalid = ("TargetClusterResolved", "False", "KubeconfigInvalid");
        fleet_client.wait_for_member(name, &[invalid]).await?;
    }
    fleet_client
        .add_member("wrong", &two.kubeconfig_with(wrong_token))
        .await?;
    let refusal = ("Connected", "False", "Unreachable");
    fleet_client.wait_for_member("wrong", &[refusal]).await?;

    // A successful upgrade, and a failed one.
    values.write(&content(2))?;
    for (at_edge, member) in [(&at_one, "edge-1"), (&at_two, "edge-2")] {
        let release = format!("tenant-acme-{member}");
        at_edge.wait_deployed("acme", &release, 2).await?;
    }
    values.write(&format!("{}broken: true\n", content(3)))?;
    for (at_edge, member) in [(&at_one, "edge-1"), (&at_two, "edge-2")] {
        let type_ = format!("ClusterError/{member}");
        let failed = (type_.as_str(), "True", "UpgradeFailed");
        at_edge.wait_for("acme", &[failed]).await?;
    }

    // A value from a Secret whose name doesn't reveal it. Helm quotes it.
    let quoted = json!({"stringData": {"values.yaml": format!("failWith: {}", value(4))}});
    fleet_client.apply_secret("fleet-values", quoted).await?;
    for (at_edge, member) in [(&at_one, "edge-1"), (&at_two, "edge-2")] {
        let type_ = format!("ClusterError/{member}");
        eventually("Helm's message without the secret", async || {
            let tenant = at_edge.tenants().get("acme").await?;
            let conditions = tenant.status.unwrap_or_default().conditions;
            let message =
                condition(&conditions, &type_).map(|condition| condition.message.as_str());
            match message {
                Some(message) if message.contains("refused: [redacted] and [redacted]") => {
                    Ok(Some(()))
                }
                message => bail!("{message:?}"),
            }
        })
        .await?;
    }
    // A readable digest doesn't cover the values alone.
    let salt = secret_text(&home, "default", "krypton-hub-values-salt", "salt").await?;
    canaries.push(Canary::text("the salt", &salt));

    // The agent renews its certificate with a new key.
    let config = stored_identity.identity.enrolled.as_ref().unwrap();
    let config = config.client_config(&stored_identity.identity.key)?;
    let dialer = Dialer::new(vec![hub.agents_address().to_string()], config);
    let (_up, mut link) = watch::channel(Link::Up(dialer.connect().await?));
    let renewed = renew(&store, &stored_identity, &mut link).await?;
    canaries.push(key_canary(&renewed));
    agent.stop().await?;
    let again = AgentOptions::new(one.kubeconfig()).env(trace());
    let agent_again = Agent::start_ready(&again).await?;
    fleet_client.wait_for_member("edge-1", &[CONNECTED]).await?;
    fleet_client.wait_for_mode("edge-1", Mode::Agent).await?;

    let observations = watcher.end();
    let mut texts = vec![
        ("the hub's log", hub.log()?),
        ("the hub's dump", hub.debug("fleet.json").await?),
        ("the agent's dump", agent_again.debug("agent.json").await?),
        ("the agent's log", agent.log()?),
        ("the agent's next log", agent_again.log()?),
    ];
    for agent in &refused {
        texts.push(("a refused agent's log", agent.log()?));
    }
    let texts = texts.into_iter();
    let texts = texts.map(|(source, text)| (source.to_owned(), text.into_bytes()));
    let mut outputs: Vec<(String, Vec<u8>)> = texts.collect();
    for (cluster, more) in [(&home, ",edgeclusters"), (&one, ""), (&two, "")] {
        let source = format!("the objects of {}", cluster.name());
        outputs.push((source, readable_objects(cluster, more).await.into_bytes()));
    }
    let processes: [(&Cluster, Option<&Daemon>); 3] = [
        (&home, Some(&hub)),
        (&one, Some(&agent_again)),
        (&two, None),
    ];
    for (cluster, process) in processes {
        outputs.extend(support_bundle(cluster, process).await?);
    }
    // The hub's own command line contains the URL unchanged.
    let of_the_hub = |line: &[u8]| String::from_utf8_lossy(line).contains("--chart-repo=");
    for line in observations.lines.iter().filter(|line| !of_the_hub(line)) {
        let command_line = String::from_utf8_lossy(line).replace('\0', " ");
        outputs.push((format!("process {command_line:.200}"), line.clone()));
    }
    // The searched data is not empty.
    let all = |words: &str| {
        outputs.iter().any(|(_, hay)| {
            String::from_utf8_lossy(hay)
                .replace('\0', " ")
                .contains(words)
        })
    };
    for words in [
        "upgrade --install",
        "TRACE",
        "UpgradeFailed",
        "EnrollmentRefused",
        // The dumps, on their own and in the bundles.
        "\"edgeClusterUid\":\"",
        "\"edgeClusterUid\": \"",
        "\"reconciling\":\"reported\"",
        "\"reconciling\": \"reported\"",
    ] {
        assert!(all(words), "{words:?} is missing");
    }
    let places_searched = || {
        outputs
            .iter()
            .map(|(source, hay)| (source.as_str(), hay.as_slice()))
    };
    let leaks = search(&canaries, places_searched());
    assert_eq!(leaks, [""; 0], "{}", leaks.join("\n"));
    // The same search finds planted secrets.
    for canary in [secret, wrong_token, key, &value(3), &value(4)] {
        let planted = format!("{} msg={canary}", hub.log()?);
        let leaks = search(&canaries, [("a log", planted.as_bytes())]);
        assert_eq!(leaks.len(), 1, "{leaks:?}");
    }

    // Files with secrets are readable only by their owner.
    assert_eq!(observations.open, BTreeSet::new());
    assert!(!observations.closed.is_empty(), "no file was checked");
    // Keys are only in their Secrets, and a join token is stored only as a digest.
    let only = |expected: &[&str]| -> BTreeSet<String> {
        expected.iter().map(|name| (*name).to_owned()).collect()
    };
    let identity = format!("{SYSTEM_NAMESPACE}/krypton-agent-identity");
    let ours = key_canary(&renewed);
    let ca = &canaries[0];
    let of_the_token = Canary::text("the join token's secret", secret);
    let of_the_secret = Canary::text("the value that helm quotes", &value(4));
    let of_the_repository = Canary::text("the key of the repository", key);
    let record = only(&["krypton-system/krypton-desired-state"]);
    for (cluster, canary, expected) in [
        (&home, ca, only(&["default/krypton-hub-ca"])),
        (&home, &ours, only(&[])),
        (&home, &of_the_token, only(&[])),
        (&one, ca, only(&[])),
        (&one, &ours, only(&[&identity])),
        (&one, &of_the_token, only(&[])),
        (&two, ca, only(&[])),
        (&home, &of_the_secret, only(&["default/fleet-values"])),
        (&one, &of_the_secret, record.clone()),
        (&two, &of_the_secret, record.clone()),
        (&home, &of_the_repository, only(&[])),
        (&one, &of_the_repository, record.clone()),
        (&two, &of_the_repository, record),
        (&two, &ours, only(&[])),
    ] {
        let leaks = secrets_with(cluster, canary).await;
        assert_eq!(leaks, expected, "{} on {}", canary.name(), cluster.name());
    }
    eventually("the hub to be ready at the end", async || {
        match hub
            .metrics()
            .await?
            .contains("krypton_hub_agent_certificate_expiry_timestamp_seconds{member=\"edge-1\"}")
        {
            true => Ok(Some(())),
            false => bail!("no expiry of edge-1"),
        }
    })
    .await?;
    Ok(())
}
