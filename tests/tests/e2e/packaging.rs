//! Verifies the charts: they pass lint, match the golden files, reject misspelled values, and are accepted by a real
//! API server.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use krypton_tests::{
    Cluster, ForeignCrd, OwnChart, Parts, TestResult, Tools, assert_contains, process::Invocation,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/golden");
const CRDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crds/crds");
const HELM_DEADLINE: Duration = Duration::from_secs(60);
/// Makes the golden files independent of the Helm version.
const KUBE_VERSION: &str = "1.30.0";

/// Helm without a cluster.
struct Helm(TempDir);

impl Helm {
    fn new() -> Self {
        Self(TempDir::with_prefix("krypton-helm-").unwrap())
    }

    async fn run(&self, args: &[&str]) -> anyhow::Result<String> {
        let home = self.0.path();
        Invocation::new(Tools::find().unwrap().binary("helm"))
            .env("HOME", home)
            .env("HELM_CACHE_HOME", home.join("cache"))
            .env("HELM_CONFIG_HOME", home.join("config"))
            .env("HELM_DATA_HOME", home.join("data"))
            .args(args)
            .output(HELM_DEADLINE)
            .await
    }

    async fn template(&self, chart: OwnChart, args: &[&str]) -> anyhow::Result<String> {
        let folder = chart.folder();
        let folder = folder.to_str().unwrap();
        let start = ["template", chart.name(), folder, "-n", chart.namespace()];
        let version = ["--kube-version", KUBE_VERSION];
        self.run(&[&start[..], &version, args].concat()).await
    }
}

/// Removes the schemas of CRDs. They are long, and another test compares them byte for byte.
fn without_schemas(rendered: &str) -> String {
    let documents =
        rendered
            .split("\n---\n")
            .map(|document| match document.split_once("\nspec:\n") {
                Some((head, _)) if head.contains("\nkind: CustomResourceDefinition\n") => head,
                _ => document,
            });
    documents.collect::<Vec<_>>().join("\n---\n")
}

/// Returns the objects of a rendered chart.
pub(crate) fn documents(yaml: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
    documents.into_iter().filter(Value::is_object).collect()
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

#[tokio::test]
async fn charts_lint_clean_and_match_golden_output() -> TestResult {
    let helm = Helm::new();
    let write = std::env::var_os("WRITE_GOLDEN").is_some();
    let mut stale = Vec::new();
    for chart in OwnChart::ALL {
        let folder = chart.folder();
        let cases = chart.cases()?;
        assert!(cases.contains_key("default"), "{cases:?}");
        let written = Path::new(GOLDEN).join(chart.name());
        let mut known: BTreeSet<PathBuf> = BTreeSet::new();
        for (case, values) in &cases {
            let values = values.to_str().unwrap();
            let lint = ["lint", "--strict", folder.to_str().unwrap(), "-f", values];
            helm.run(&lint).await?;
            let rendered = helm.template(chart, &["-f", values]).await?;
            let rendered = without_schemas(&rendered);
            let golden = written.join(format!("{case}.yaml"));
            if write {
                fs::create_dir_all(&written)?;
                fs::write(&golden, &rendered)?;
            }
            if fs::read_to_string(&golden).unwrap_or_default() != rendered {
                stale.push(format!("{}/{case}", chart.name()));
            }
            known.insert(golden);
        }
        let golden_files = fs::read_dir(&written)?;
        for file in golden_files.map(|entry| entry.unwrap().path()) {
            assert!(known.contains(&file), "{} has no case", file.display());
        }
    }
    assert!(
        stale.is_empty(),
        "{stale:?} differ from tests/golden; check the difference, then write them again \
         with: WRITE_GOLDEN=1 cargo test -p krypton-tests --test e2e packaging"
    );
    Ok(())
}

#[tokio::test]
async fn unknown_or_mistyped_chart_value_is_rejected() {
    let helm = Helm::new();
    for chart in OwnChart::ALL {
        for (set, expected_text) in [
            ("--set=replicaCountt=1", "replicaCountt"),
            ("--set=image.repositry=x", "repositry"),
            ("--set=helmRights.clusterrole=x", "clusterrole"),
            ("--set=crds.instal=false", "instal"),
            ("--set=installMode.crdsRbac=true", "crdsRbac"),
            ("--set-string=replicaCount=one", "replicaCount"),
            ("--set=replicaCount=6", "replicaCount"),
            ("--set-string=crds.install=no", "install"),
            ("--set=helm.maxConcurrent=65", "maxConcurrent"),
            ("--set=logFormat=xml", "logFormat"),
            ("--set=extraArgs=--x", "extraArgs"),
        ] {
            let error = helm.template(chart, &[set]).await.expect_err(set);
            assert_contains!(format!("{error:#}"), "schema", expected_text);
        }
    }
}

#[tokio::test]
async fn hub_chart_requires_the_fleets_chart() {
    let helm = Helm::new();
    let repo = "--set=chart.repo=https://charts.example.org";
    for (set, expected_text) in [
        (vec![], "set chart.repo and chart.name"),
        (vec![repo], "set chart.repo and chart.name"),
        (
            vec!["--set=chart.name=small"],
            "set chart.repo to the repository of chart small",
        ),
    ] {
        let error = helm.template(OwnChart::Hub, &set).await.unwrap_err();
        assert_contains!(format!("{error:#}"), expected_text);
    }
    for set in [
        vec![repo, "--set=chart.name=small"],
        vec!["--set=chart.name=/charts/small-1.0.0.tgz"],
        vec!["--set=chart.name=oci://registry.example.org/small"],
        vec!["--set=installMode.crdsRbacOnly=true"],
    ] {
        let rendered = helm.template(OwnChart::Hub, &set).await;
        assert!(rendered.is_ok(), "{set:?}: {rendered:?}");
    }
}

#[tokio::test]
async fn values_of_krypton_operator_never_start_it() -> TestResult {
    const HUB: &str = concat!("ghcr.io/openkcm/krypton-hub:", env!("CARGO_PKG_VERSION"));
    let helm = Helm::new();
    let file = OwnChart::Hub.cases()?["krypton-operator"].clone();
    let file = file.to_str().unwrap();
    let digest = format!("--set=image.digest=sha256:{}", "0".repeat(64));
    for (set, image, command, first_arg) in [
        (digest.as_str(), HUB, None, "--namespace=krypton-operator"),
        (
            "--set=image.repository=team/crypto-edge-operator:v0.1.0",
            HUB,
            None,
            "--namespace=krypton-operator",
        ),
        (
            "--set=image.repository=krypton-hub,image.command={/bin/hub}",
            "ghcr.io/openkcm/krypton-hub:v0.2.0",
            Some(json!(["/bin/hub"])),
            "--namespace=krypton-operator",
        ),
        (
            "--set=image.args={-namespace=own}",
            HUB,
            None,
            "-namespace=own",
        ),
    ] {
        let rendered = helm.template(OwnChart::Hub, &["-f", file, set]).await?;
        let deployment = documents(&rendered)
            .into_iter()
            .find(|object| text(object, "/kind") == "Deployment")
            .unwrap();
        let container = "/spec/template/spec/containers/0";
        assert_eq!(text(&deployment, &format!("{container}/image")), image);
        let field = |name: &str| deployment.pointer(&format!("{container}/{name}"));
        assert_eq!(field("command"), command.as_ref(), "{set}");
        assert_eq!(field("args/0"), Some(&json!(first_arg)), "{set}");
    }
    for (namespace, is_accepted) in [("krypton", true), ("krypton-operator", false)] {
        let set = format!("--set=namespace={namespace}");
        let rendered = helm.template(OwnChart::Hub, &["-f", file, &set]).await;
        let error = rendered.err().map(|error| format!("{error:#}"));
        assert_eq!(error.is_none(), is_accepted, "{error:?}");
        let remedy = format!("install it with -n {namespace}");
        assert!(error.is_none_or(|error| error.contains(&remedy)));
    }
    Ok(())
}

#[tokio::test]
async fn notes_name_values_to_replace_in_each_mode() -> TestResult {
    let helm = Helm::new();
    let file = OwnChart::Hub.cases()?["krypton-operator"].clone();
    let folder = OwnChart::Hub.folder();
    let start = [
        "install",
        OwnChart::Hub.name(),
        folder.to_str().unwrap(),
        "--dry-run=client",
        "-n",
        OwnChart::Hub.namespace(),
        "-f",
        file.to_str().unwrap(),
    ];
    for mode in ["false", "true"] {
        let mode = format!("--set=installMode.crdsRbacOnly={mode}");
        let output = helm.run(&[&start[..], &[mode.as_str()]].concat()).await?;
        assert_contains!(
            output,
            "Remove or replace these values of krypton-operator's chart:\n"
        );
    }
    Ok(())
}

#[tokio::test]
async fn access_provider_without_program_is_rejected_by_name() -> TestResult {
    let helm = Helm::new();
    let values = OwnChart::Hub.folder().join("ci/multicluster-values.yaml");
    let values = values.to_str().unwrap();
    let provider = "multicluster.accessProvidersConfig.providers[0]";
    for (set, expected_text) in [
        (
            "multicluster.accessProvidersConfig=null".to_owned(),
            "accessProvidersConfig.providers",
        ),
        (
            "multicluster.accessProvidersConfig.providers=null".to_owned(),
            "accessProvidersConfig.providers",
        ),
        (
            "multicluster.plugins[0].mountPath=plugins".to_owned(),
            "mountPath",
        ),
        (
            "multicluster.plugins=null".to_owned(),
            "/plugins/secretreader/bin/secretreader-plugin",
        ),
        (
            format!("{provider}.execConfig.command=secretreader"),
            "\"secretreader\"",
        ),
        (
            format!("{provider}.execConfig.command=/plugins/secretreader/../x"),
            "is not below a mountPath",
        ),
        (
            format!("{provider}.profileSourcedCLIArgsPolicy=append"),
            "profileSourcedCLIArgsPolicy",
        ),
    ] {
        let args = ["-f", values, "--set", &set];
        let error = helm.template(OwnChart::Hub, &args).await.unwrap_err();
        assert_contains!(format!("{error:#}"), expected_text);
    }
    // The installation of rights alone contains no file.
    let rights = [
        "-f",
        values,
        "--set=installMode.crdsRbacOnly=true,multicluster.accessProvidersConfig=null",
    ];
    let rendered = helm.template(OwnChart::Hub, &rights).await?;
    assert!(rendered.contains("clusterprofiles") && !rendered.contains("config.json"));
    Ok(())
}

#[tokio::test]
async fn disabled_alert_is_omitted_and_unknown_one_rejected() -> TestResult {
    let helm = Helm::new();
    for chart in OwnChart::ALL {
        let cases = chart.cases()?;
        let values = cases["default"].to_str().unwrap();
        let rendered = async |disabled: &str| {
            let disabled = format!("--set-json=prometheusRule.disabled=[{disabled}]");
            let args = ["-f", values, "--set=prometheusRule.enabled=true", &disabled];
            helm.template(chart, &args).await
        };
        let alerts = |yaml: &str| {
            let rules = documents(yaml)
                .into_iter()
                .find(|object| text(object, "/kind") == "PrometheusRule")
                .unwrap();
            let rules = rules.pointer("/spec/groups/0/rules").unwrap().clone();
            rules.as_array().unwrap().clone()
        };
        let all = alerts(&rendered("").await?);
        let file = fs::read_to_string(chart.folder().join("files/alerts.yaml"))?;
        let file: Value = serde_saphyr::from_str(&file)?;
        assert_eq!(all.len(), file["rules"].as_array().unwrap().len());
        for (rule, written) in all.iter().zip(file["rules"].as_array().unwrap()) {
            let name = text(rule, "/alert");
            let (page, anchor) = (text(rule, "/annotations/runbook_url"), name.to_lowercase());
            let expected = format!("/docs/reference/runbook.md#{anchor}");
            assert!(
                page.starts_with("https://") && page.ends_with(&expected),
                "{page}"
            );
            // Helm must not expand Prometheus templates.
            for field in ["/expr", "/annotations/description", "/labels/severity"] {
                assert_eq!(text(rule, field), text(written, field), "{name}");
            }
            let remaining = alerts(&rendered(&format!("{name:?}")).await?);
            assert!(remaining.len() < all.len(), "{name}");
            assert!(remaining.iter().all(|rule| text(rule, "/alert") != name));
        }
        let refused = rendered("\"KryptonHubUp\"").await.unwrap_err();
        assert_contains!(format!("{refused:#}"), "KryptonHubUp");
    }
    Ok(())
}

#[test]
fn charts_carry_identical_crds_and_shared_templates() {
    let read = |path: PathBuf| {
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let names = |folder: &Path| -> BTreeSet<_> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    let tenants = BTreeSet::from(["tenants.mesh.openkcm.io.yaml".into()]);
    for (chart, expected) in [
        (OwnChart::Hub, names(Path::new(CRDS))),
        (OwnChart::Agent, tenants),
    ] {
        let folder = chart.folder().join("crd-files");
        assert_eq!(names(&folder), expected, "{}", chart.name());
        for name in expected {
            let same = read(folder.join(&name)) == read(Path::new(CRDS).join(&name));
            assert!(same, "{}: copy crds/crds/{name:?} to it", folder.display());
        }
    }
    let [hub, agent] = OwnChart::ALL.map(|chart| chart.folder().join("templates/_shared.tpl"));
    assert!(
        read(hub) == read(agent),
        "_shared.tpl differs in the two charts"
    );
}

#[test]
fn metadata_of_charts_lists_maintainers_and_crds() {
    for chart in OwnChart::ALL {
        let folder = chart.folder();
        let metadata = fs::read_to_string(folder.join("Chart.yaml")).unwrap();
        let metadata: Value = serde_saphyr::from_str(&metadata).unwrap();
        for field in ["/home", "/icon", "/maintainers/0/url"] {
            let is_url = text(&metadata, field).starts_with("https://");
            assert!(is_url, "{chart:?} {field}");
        }
        assert_ne!(text(&metadata, "/maintainers/0/name"), "", "{chart:?}");
        let (_, icon) = text(&metadata, "/icon").split_once("/main/").unwrap();
        assert!(folder.join("../..").join(icon).is_file(), "{icon}");
        let listed = text(&metadata, "/annotations/artifacthub.io~1crds");
        let listed: Vec<Value> = serde_saphyr::from_str(listed).unwrap();
        let files = listed
            .iter()
            .map(|crd| format!("{}.yaml", text(crd, "/name")));
        let files: BTreeSet<String> = files.collect();
        let present = fs::read_dir(folder.join("crd-files")).unwrap();
        let present = present.map(|file| file.unwrap().file_name().into_string().unwrap());
        let present: BTreeSet<String> = present.collect();
        assert_eq!(files, present, "{chart:?}");
    }
}

#[tokio::test]
async fn release_requires_one_version_and_registry() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../hack/release.sh");
    let own = concat!("v", env!("CARGO_PKG_VERSION"));
    let registry = "registry.example.org:5000/krypton";
    for (tag, registry, expected_error) in [
        ("", "", None),
        ("", registry, None),
        (own, registry, None),
        (own, "", Some("REGISTRY is empty")),
        (own, "registry.example.org/a b", Some("REGISTRY is '")),
        ("v0.0.0", registry, Some("the tag is v0.0.0")),
    ] {
        let check = Invocation::new("bash")
            .args([script, "check"])
            .env("PATH", "/usr/bin:/bin")
            .env("RELEASE_TAG", tag)
            .env("REGISTRY", registry);
        let error = check.output(HELM_DEADLINE).await.err();
        let error = error.map(|error| format!("{error:#}"));
        let is_expected = match (&error, expected_error) {
            (None, None) => true,
            (Some(error), Some(expected)) => error.contains(expected),
            _ => false,
        };
        assert!(is_expected, "{tag} {registry}: {error:?}");
    }
}

/// Starts a cluster with all prerequisites of the cases, and with the restricted Pod Security standard.
async fn restricted_cluster(objects: &[Value]) -> TestResult<Cluster> {
    let cluster = Cluster::start("packaging", Parts::ControlPlane).await?;
    for plural in ["servicemonitors", "prometheusrules"] {
        let file = format!("monitoring.coreos.com_{plural}.yaml");
        let crd = ForeignCrd::read(&cluster, "prometheus-operator-0.85.0", &file).await;
        crd?.install(&cluster).await?;
    }
    let mut namespaces: BTreeSet<&str> = objects
        .iter()
        .map(|object| text(object, "/metadata/namespace"))
        .filter(|namespace| !["", "default"].contains(namespace))
        .collect();
    namespaces.extend(OwnChart::ALL.map(OwnChart::namespace));
    for namespace in namespaces {
        let labels = json!({"pod-security.kubernetes.io/enforce": "restricted"});
        let namespace = json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": labels},
        });
        cluster.apply(&namespace.to_string()).await?;
    }
    Ok(cluster)
}

/// Returns the pod that a Deployment would create, or the object itself if it is a pod.
fn pod(object: &Value) -> Option<Value> {
    match text(object, "/kind") {
        "Pod" => Some(object.clone()),
        "Deployment" => {
            let template = object.pointer("/spec/template")?;
            let mut metadata = template["metadata"].clone();
            metadata["name"] = json!("a-pod");
            metadata["namespace"] = object.pointer("/metadata/namespace")?.clone();
            let spec = &template["spec"];
            Some(json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}))
        }
        _ => None,
    }
}

/// Returns the objects of `helm test`, and the installed ones.
fn split_test_hooks(rendered: &str) -> (Vec<Value>, Vec<Value>) {
    const HOOK: &str = "/metadata/annotations/helm.sh~1hook";
    documents(rendered)
        .into_iter()
        .partition(|object| text(object, HOOK) == "test")
}

#[tokio::test]
async fn helm_test_of_hub_only_reads() -> TestResult {
    let helm = Helm::new();
    for (case, values) in OwnChart::Hub.cases()? {
        let args = ["-f", values.to_str().unwrap()];
        let rendered = helm.template(OwnChart::Hub, &args).await?;
        let (hooks, installed) = split_test_hooks(&rendered);
        // Where no hub runs, or the home cluster is another one, nothing is tested.
        if ["crds-rbac-only", "watch-cluster"].contains(&case.as_str()) {
            assert!(hooks.is_empty(), "{case}: {hooks:?}");
            continue;
        }
        let rules = hooks.iter().filter_map(|hook| hook["rules"].as_array());
        for rule in rules.flatten() {
            let verbs = rule["verbs"].as_array().unwrap();
            let reads = verbs.iter().all(|verb| *verb == "get" || *verb == "list");
            let reviews = rule["resources"] == json!(["subjectaccessreviews"]);
            assert!(reads || reviews, "{case}: {rule}");
        }
        let test_pod = hooks.iter().find_map(pod).unwrap();
        let hub_pod = installed.iter().find_map(pod).unwrap();
        let image = "/spec/containers/0/image";
        assert_eq!(text(&test_pod, image), text(&hub_pod, image), "{case}");
        let account = "/spec/serviceAccountName";
        assert_ne!(text(&test_pod, account), text(&hub_pod, account), "{case}");
        // The Services and the Deployment select the hub's pods by this label.
        let name = "/metadata/labels/app.kubernetes.io~1name";
        assert_ne!(text(&test_pod, name), text(&hub_pod, name), "{case}");
    }
    Ok(())
}

#[tokio::test]
async fn helm_test_of_agent_needs_no_rights() -> TestResult {
    let helm = Helm::new();
    for (case, values) in OwnChart::Agent.cases()? {
        let args = ["-f", values.to_str().unwrap()];
        let rendered = helm.template(OwnChart::Agent, &args).await?;
        let (hooks, installed) = split_test_hooks(&rendered);
        if case == "crds-rbac-only" {
            assert!(hooks.is_empty(), "{case}: {hooks:?}");
            continue;
        }
        let kinds: BTreeSet<&str> = hooks.iter().map(|hook| text(hook, "/kind")).collect();
        assert_eq!(kinds, BTreeSet::from(["Pod", "Service"]), "{case}");
        let test_pod = hooks.iter().find_map(pod).unwrap();
        let agent_pod = installed.iter().find_map(pod).unwrap();
        let image = "/spec/containers/0/image";
        assert_eq!(text(&test_pod, image), text(&agent_pod, image), "{case}");
        assert_eq!(text(&test_pod, "/spec/serviceAccountName"), "default");
        // The Service of the test selects the agents, and not the pod of the test.
        let selector = hooks.iter().find_map(|hook| hook.pointer("/spec/selector"));
        let selector = selector.and_then(Value::as_object).unwrap();
        let is_selected = |pod: &Value| {
            let labels = &pod["metadata"]["labels"];
            selector.iter().all(|(name, value)| labels[name] == *value)
        };
        let selected = [&agent_pod, &test_pod].map(is_selected);
        assert_eq!(selected, [true, false], "{case}");
    }
    let long_name = format!("--set=fullnameOverride={}", "a".repeat(63));
    let long_name = [long_name.as_str()];
    let rendered = helm.template(OwnChart::Agent, &long_name).await?;
    for hook in split_test_hooks(&rendered).0 {
        let name = text(&hook, "/metadata/name");
        assert!(name.len() <= 63, "{name}");
        if text(&hook, "/kind") == "Service" {
            assert!(rendered.contains(&format!("\"{name}:8080\"")), "{name}");
        }
    }
    let no_metrics = ["--set=metrics.enabled=false"];
    let rendered = helm.template(OwnChart::Agent, &no_metrics).await?;
    assert!(split_test_hooks(&rendered).0.is_empty());
    Ok(())
}

#[tokio::test]
async fn apiserver_accepts_rendered_objects_and_restricted_pods() -> TestResult {
    let helm = Helm::new();
    let mut rendered = Vec::new();
    for chart in OwnChart::ALL {
        for (case, values) in chart.cases()? {
            let args = ["-f", values.to_str().unwrap()];
            let yaml = helm.template(chart, &args).await?;
            rendered.push((format!("{} {case}", chart.name()), yaml));
        }
    }
    let all: Vec<Value> = rendered
        .iter()
        .flat_map(|(_, yaml)| documents(yaml))
        .collect();
    let cluster = restricted_cluster(&all).await?;
    let scratch = TempDir::with_prefix("krypton-rendered-")?;
    let dry_run = async |yaml: &str| {
        let file = scratch.path().join("objects.yaml");
        fs::write(&file, yaml).unwrap();
        let file = file.to_str().unwrap().to_owned();
        let args = ["apply", "--dry-run=server", "--validate=strict", "-f"];
        let args = args.map(str::to_owned).into_iter().chain([file]);
        cluster.kubectl(args).await
    };

    let mut checked = 0;
    for (case, yaml) in &rendered {
        let pods: Vec<Value> = documents(yaml).iter().filter_map(pod).collect();
        for pod in &pods {
            let account = json!({
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {
                    "name": pod.pointer("/spec/serviceAccountName"),
                    "namespace": pod.pointer("/metadata/namespace"),
                },
            });
            cluster.apply(&account.to_string()).await?;
        }
        if let Err(error) = dry_run(yaml).await {
            panic!("{case}: {error:#}");
        }
        for pod in pods {
            if let Err(error) = dry_run(&pod.to_string()).await {
                panic!("the pod of {case}: {error:#}");
            }
            // Verify that the namespace really enforces the standard.
            let mut lax = pod;
            lax["spec"]["securityContext"] = json!({});
            lax["spec"]["containers"][0]["securityContext"] = json!({});
            let refused = dry_run(&lax.to_string()).await.unwrap_err();
            assert_contains!(format!("{refused:#}"), "violates PodSecurity");
            checked += 1;
        }
    }
    assert!(checked >= 3, "{checked}");
    Ok(())
}
