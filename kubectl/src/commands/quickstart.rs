//! `kubectl krypton quickstart`: creates a kind cluster with a hub that also manages this cluster, and a first Tenant.
//! A second run changes only what differs. All requests go to the cluster that kind hands out.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use krypton_types::conditions::READY;
use krypton_types::names::{SELF_CLUSTER, namespace_name};
use kube::api::DynamicObject;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::check::ensure_installable;
use crate::error::KubectlError;
use crate::helm::{CHART_REGISTRY, ChartValues, HelmArgs};
use crate::home::{Connection, Target, TargetArgs};
use crate::kind::Kind;
use crate::objects::{Objects, Scope, condition};
use crate::output::print_now;
use crate::program::Program;
use crate::render::{CommandOutput, reason_and_message, text_at};
use crate::tool::{Tool, temporary_file};

const DEFAULT_CLUSTER: &str = "krypton";
/// Repository, name and version of the fleet's chart if the user names none.
const DEFAULT_CHART: [&str; 3] = ["https://stefanprodan.github.io/podinfo", "podinfo", "6.9.1"];
/// Namespace of the Tenant, which is also that of kind's context.
const TENANT_NAMESPACE: &str = "default";
const INTERVAL: Duration = Duration::from_secs(2);
/// Time for kind to download the image of the node, in addition to the user's timeout.
const DOWNLOAD_TIME: Duration = Duration::from_secs(600);
const EXAMPLES: &str = "\
Examples:
  # Create a cluster with an image that you have built
  kubectl krypton quickstart --load-image krypton-hub:VERSION

  # Use your own chart instead of podinfo
  kubectl krypton quickstart --load-image krypton-hub:VERSION --chart-repo URL --chart-name NAME

  # Delete the cluster
  kubectl krypton quickstart --delete";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Quickstart {
    /// Name of the kind cluster. The command uses an existing one
    #[arg(long, value_name = "NAME", default_value = DEFAULT_CLUSTER, value_parser = namespace_name)]
    name: String,
    /// The kind program
    #[arg(long, value_name = "PATH", default_value = "kind")]
    kind: PathBuf,
    /// Name of the fleet's chart; by default podinfo, a small public chart
    #[arg(long, value_name = "NAME")]
    chart_name: Option<String>,
    /// URL of that chart's repository
    #[arg(long, value_name = "URL", requires = "chart_name")]
    chart_repo: Option<String>,
    /// Version of the fleet's chart; by default the latest stable one, for podinfo 6.9.1
    #[arg(long, value_name = "VERSION")]
    chart_version: Option<String>,
    /// Name of the first Tenant, in the namespace default
    #[arg(long, value_name = "NAME", default_value = "first", value_parser = namespace_name)]
    tenant: String,
    #[command(flatten)]
    values: ChartValues,
    /// An image on this machine to load into the cluster, if no registry has it; repeatable
    #[arg(long = "load-image", value_name = "IMAGE")]
    load_images: Vec<String>,
    /// Delete the kind cluster, and nothing else
    #[arg(
        long,
        conflicts_with_all = [
            "chart_name", "chart_repo", "chart_version", "tenant", "load_images",
            "files", "values", "texts", "texts_of_files",
        ]
    )]
    delete: bool,
    #[command(flatten)]
    helm: HelmArgs,
}

impl Quickstart {
    /// Fails unless the chart or the user names where the hub's image is.
    fn require_image(&self) -> Result<(), KubectlError> {
        let mut keys = ["image.registry", "image.repository"].into_iter();
        let is_named = keys.any(|key| self.values.sets(key));
        match is_named || !self.load_images.is_empty() || CHART_REGISTRY.is_some() {
            true => Ok(()),
            false => Err(KubectlError::usage(
                "the default registry has no image of the hub; load one from this machine with --load-image IMAGE, or name a registry with --set image.registry=REGISTRY",
            )),
        }
    }

    /// Values of the hub's chart. An existing hub keeps the values that the user does not change.
    fn hub_values(&self, is_new: bool) -> Value {
        let [repo, name, version] = DEFAULT_CHART;
        let named_version = self.chart_version.as_deref();
        let chart = match (&self.chart_name, named_version) {
            (Some(name), version) => json!({
                "repo": self.chart_repo.as_deref().unwrap_or_default(),
                "name": name,
                "version": version.unwrap_or_default(),
            }),
            (None, named) if is_new => {
                json!({"repo": repo, "name": name, "version": named.unwrap_or(version)})
            }
            (None, Some(version)) => json!({ "version": version }),
            (None, None) => json!({}),
        };
        match is_new {
            true => json!({"replicaCount": 1, "selfCluster": true, "chart": chart}),
            false => json!({ "chart": chart }),
        }
    }
}

/// A kind cluster, which may not exist yet.
#[derive(Clone, Copy, Debug)]
struct KindCluster<'a> {
    name: &'a str,
    kind: Tool<'a>,
    timeout: Duration,
}

impl<'a> KindCluster<'a> {
    fn new(args: &'a Quickstart) -> Self {
        Self {
            name: &args.name,
            kind: Tool {
                name: "kind",
                path: &args.kind,
                remedy: "install it from https://kind.sigs.k8s.io, or name it with --kind",
            },
            timeout: args.helm.timeout,
        }
    }

    /// The context that kind adds to the user's kubeconfig.
    fn context(&self) -> String {
        format!("kind-{}", self.name)
    }

    /// The command that deletes the cluster.
    fn deletion(&self) -> String {
        let name = match self.name {
            DEFAULT_CLUSTER => String::new(),
            name => format!(" --name {name}"),
        };
        format!("kubectl krypton quickstart --delete{name}")
    }

    async fn run(&self, args: &[&str], task: &str) -> Result<String, KubectlError> {
        let next_step = format!("'{}' deletes what it created", self.deletion());
        let deadline = self.timeout + DOWNLOAD_TIME;
        self.kind.run(args, deadline, (task, &next_step)).await
    }

    async fn exists(&self) -> Result<bool, KubectlError> {
        let task = "to list its clusters; check that Docker runs";
        let clusters = self.run(&["get", "clusters"], task).await?;
        Ok(clusters.lines().any(|line| line.trim() == self.name))
    }

    async fn create(&self) -> Result<(), KubectlError> {
        let wait = format!("{}s", self.timeout.as_secs().max(1));
        let flags = ["--name", self.name, "--wait", wait.as_str()];
        let task = format!(
            "to create the cluster {}; remove the cause and run the command again",
            self.name
        );
        let args = [&["create", "cluster"][..], &flags].concat();
        self.run(&args, &task).await.map(drop)
    }

    /// Copies images of this machine to the nodes.
    async fn load(&self, images: &[String]) -> Result<(), KubectlError> {
        let mut args = vec!["load", "docker-image"];
        args.extend(images.iter().map(String::as_str));
        args.extend(["--name", self.name]);
        let task = "to load the images; check that docker images lists them";
        self.run(&args, task).await.map(drop)
    }

    /// Writes kind's own kubeconfig to a file that only the user can read. The user's kubeconfig may lack the context,
    /// or have another cluster of that name.
    async fn kubeconfig(&self) -> Result<NamedTempFile, KubectlError> {
        let args = ["get", "kubeconfig", "--name", self.name];
        let kubeconfig = self.run(&args, "to return the kubeconfig").await?;
        temporary_file("the kubeconfig", &kubeconfig)
    }

    async fn delete(&self) -> Result<CommandOutput, KubectlError> {
        let name = self.name;
        if !self.exists().await? {
            return Ok(CommandOutput::stdout(format!(
                "there is no kind cluster {name}\n"
            )));
        }
        let task = format!("to delete the cluster {name}");
        self.run(&["delete", "cluster", "--name", name], &task)
            .await?;
        Ok(CommandOutput::stdout(format!(
            "kind cluster {name} deleted\n"
        )))
    }
}

/// Prints each step when it starts.
struct Progress<'a> {
    out: &'a mut dyn Write,
    step: String,
}

impl Progress<'_> {
    fn begin(&mut self, step: impl Into<String>) -> Result<(), KubectlError> {
        self.step = step.into();
        print_now(self.out, &format!("{}\n", self.step)).map(drop)
    }
}

pub(crate) async fn run(
    args: Quickstart,
    target: &Target<'_>,
    out: &mut dyn Write,
) -> Result<CommandOutput, KubectlError> {
    target.args.reject_cluster()?;
    let cluster = KindCluster::new(&args);
    if args.delete {
        return cluster.delete().await;
    }
    let mut progress = Progress {
        out,
        step: String::new(),
    };
    let name = &args.name;
    let exists = cluster.exists().await?;
    if !exists {
        args.require_image()?;
    }
    // The creation of a cluster takes minutes.
    args.helm.check_version().await?;
    if exists {
        progress.begin(format!("using the kind cluster {name}"))?;
    } else {
        progress.begin(format!("creating the kind cluster {name}"))?;
        cluster.create().await?;
    }
    let set_up = Box::pin(set_up(&args, &cluster, target, &mut progress));
    // An interrupt must not leave files with the rights of an administrator.
    let result = tokio::select! {
        result = set_up => result,
        _ = tokio::signal::ctrl_c() => Err(KubectlError::Failed("you interrupted the command".to_owned())),
    };
    match result {
        Ok(()) => Ok(CommandOutput::stdout(next_steps(&args, &cluster))),
        // The lines of the checks contain the cause and the fix.
        Err(error @ KubectlError::NotReady { .. }) => Err(error),
        Err(error) => Err(KubectlError::Interrupted {
            consequence: format!(
                "{} failed, and nothing was deleted; remove the cause and run the command again, or delete the cluster with '{}'",
                progress.step,
                cluster.deletion()
            ),
            source: Box::new(error),
        }),
    }
}

/// Installs the hub on the cluster, and creates the Tenant. Waits until both are ready.
async fn set_up(
    args: &Quickstart,
    cluster: &KindCluster<'_>,
    target: &Target<'_>,
    progress: &mut Progress<'_>,
) -> Result<(), KubectlError> {
    if !args.load_images.is_empty() {
        progress.begin(format!("loading {}", args.load_images.join(", ")))?;
        cluster.load(&args.load_images).await?;
    }
    progress.begin("installing the hub")?;
    let kubeconfig = cluster.kubeconfig().await?;
    let target = Target {
        args: TargetArgs {
            kubeconfig: Some(kubeconfig.path().to_owned()),
            context: Some(cluster.context()),
            request_timeout: target.args.request_timeout,
            ..TargetArgs::default()
        },
        env: target.env,
    };
    let home = target.connect().await?;
    install_hub(args, &target.args, &home).await?;

    let times = (INTERVAL, args.helm.timeout);
    let context = &home.context;
    progress.begin(format!("waiting for the member {SELF_CLUSTER}"))?;
    let members = home.members();
    let explain = format!("explain cluster {SELF_CLUSTER} --context {context}");
    wait_until_ready(&members, SELF_CLUSTER, times, &explain).await?;

    let tenant = &args.tenant;
    progress.begin(format!("creating the Tenant {tenant}"))?;
    let scope = Scope::Namespace(TENANT_NAMESPACE.to_owned());
    let tenants = home.untyped(Kind::Tenant.resource(), &scope);
    create_tenant(&tenants, tenant).await?;
    progress.begin(format!("waiting for the Tenant {tenant}"))?;
    let explain = format!("explain tenant {tenant} -n {TENANT_NAMESPACE} --context {context}");
    wait_until_ready(&tenants, tenant, times, &explain).await
}

async fn install_hub(
    args: &Quickstart,
    cluster: &TargetArgs,
    home: &Connection,
) -> Result<(), KubectlError> {
    ensure_installable(home, Program::Hub).await?;
    let namespace = Program::Hub.default_namespace();
    let release = args.helm.release(Program::Hub, namespace, cluster);
    let is_new = !release.is_installed().await?;
    let file = temporary_file("the hub's values", &args.hub_values(is_new).to_string())?;
    let file = file.path().display().to_string();
    let mut values = vec![["--values".to_owned(), file]];
    values.extend(args.values.flags());
    release.install(home, None, &values).await.map(drop)
}

/// Creates the Tenant if it does not exist.
async fn create_tenant(tenants: &Objects<DynamicObject>, name: &str) -> Result<(), KubectlError> {
    let tenant = DynamicObject::new(name, &tenants.kind).data(json!({"spec": {}}));
    match tenants.create(name, &tenant).await {
        Err(error) if error.code() == Some(409) => Ok(()),
        result => result,
    }
}

/// Waits until the object is Ready. `explain` is the command that shows why it is not.
async fn wait_until_ready(
    objects: &Objects<DynamicObject>,
    name: &str,
    times: (Duration, Duration),
    explain: &str,
) -> Result<(), KubectlError> {
    let mut state = "it has no status yet".to_owned();
    let check = |object: Option<DynamicObject>| {
        let ready = object.as_ref().and_then(|object| condition(object, READY));
        let Some(ready) = ready else {
            return Ok(None);
        };
        let text = |path| text_at(ready, path).unwrap_or_default();
        state = reason_and_message(&text("/reason"), &text("/message"));
        Ok((ready["status"] == "True").then_some(()))
    };
    let ready = objects.wait_for(name, times, check).await?;
    ready.ok_or_else(|| {
        KubectlError::NoResponse(format!(
            "{} is not Ready after {} s; 'kubectl krypton {explain}' shows the cause: {state}",
            objects.full_name(name),
            times.1.as_secs()
        ))
    })
}

fn next_steps(args: &Quickstart, cluster: &KindCluster<'_>) -> String {
    let (tenant, name) = (&args.tenant, cluster.name);
    let (context, deletion) = (cluster.context(), cluster.deletion());
    format!(
        "Tenant {tenant} is Ready on the kind cluster {name}, whose context is {context}. Next:\n  \
         kubectl krypton get tenants --context {context}\n  \
         kubectl krypton explain tenant {tenant} --context {context}\n  \
         kubectl krypton install hub --context {context} --set chart.version=VERSION\n  \
         {deletion}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;
    use jiff::Timestamp;
    use krypton_types::error_chain::chain;
    use tempfile::TempDir;

    use super::*;
    use crate::tests::stub_program;

    #[derive(Debug, Parser)]
    struct TestCli {
        #[command(flatten)]
        quickstart: Quickstart,
    }

    /// A folder with two programs. `kind` records its arguments and runs these cases of a shell. `helm` prints its
    /// version.
    struct StubKind(TempDir);

    impl StubKind {
        fn new(cases: &str) -> Self {
            let folder = TempDir::new().unwrap();
            let script = format!("echo \"$*\" >>calls\ncase \"$1 $2\" in\n{cases}\nesac");
            stub_program(folder.path(), "kind", &script);
            stub_program(folder.path(), "helm", "echo v3.14.0+g0");
            Self(folder)
        }

        /// Runs the command with these programs. Returns its output or error, and all that it printed before.
        async fn quickstart(&self, args: &[&str]) -> (Result<CommandOutput, String>, String) {
            let path = |name: &str| self.0.path().join(name).display().to_string();
            let (kind, helm) = (path("kind"), path("helm"));
            let flags = ["--kind", kind.as_str(), "--helm", helm.as_str()];
            run_command(&[args, &flags].concat()).await
        }

        /// The arguments of each run.
        fn calls(&self) -> Vec<String> {
            let calls = fs::read_to_string(self.0.path().join("calls")).unwrap_or_default();
            calls.lines().map(str::to_owned).collect()
        }
    }

    async fn run_command(args: &[&str]) -> (Result<CommandOutput, String>, String) {
        let mut out = Vec::new();
        let line = [&["kubectl-krypton", "quickstart"][..], args].concat();
        let line = line.into_iter().map(std::ffi::OsString::from);
        let env = |_: &str| -> Option<String> { None };
        let running = crate::run(line, &env, Timestamp::UNIX_EPOCH, &mut out);
        let result = Box::pin(running).await.map_err(|error| chain(&error));
        (result, String::from_utf8(out).unwrap())
    }

    #[tokio::test]
    async fn missing_or_failing_kind_is_named() {
        let (result, _) = run_command(&["--kind", "/nonexistent/kind"]).await;
        let error = result.unwrap_err();
        let expected = "there is no program /nonexistent/kind; install it from https://kind";
        assert!(error.contains(expected), "{error}");

        let kind =
            StubKind::new("*) echo 'ERROR: Cannot connect to the Docker daemon' >&2; exit 1;;");
        let (result, out) = kind.quickstart(&[]).await;
        let error = result.unwrap_err();
        let expected =
            "kind failed to list its clusters; check that Docker runs: ERROR: Cannot connect";
        assert!(error.contains(expected), "{error}");
        assert_eq!(kind.calls(), ["get clusters"]);
        assert_eq!(out, "");
    }

    #[tokio::test]
    async fn no_cluster_is_created_without_current_helm() {
        let kind = StubKind::new("");
        stub_program(kind.0.path(), "helm", "echo v3.13.9+g0");
        let (result, out) = kind.quickstart(&["--load-image=hub:1"]).await;
        let error = result.unwrap_err();
        let expected = "is Helm v3.13.9+g0, older than 3.14; install a newer Helm";
        assert!(error.contains(expected), "{error}");
        assert_eq!(kind.calls(), ["get clusters"]);
        assert_eq!(out, "");
    }

    #[tokio::test]
    async fn failed_step_names_cause_retry_and_deletion() {
        let context = json!({"name": "production", "context": {"cluster": "c", "user": "u"}});
        let other = json!({"clusters": [], "users": [], "contexts": [context]});
        let kind = StubKind::new(&format!("'get kubeconfig') echo '{other}';;"));
        let flags = [
            "--name=try",
            "--timeout=1m",
            "--load-image=hub:1",
            "--load-image=app:1",
        ];
        let (result, out) = kind.quickstart(&flags).await;
        let error = result.unwrap_err();
        for expected in [
            "installing the hub failed, and nothing was deleted",
            "run the command again",
            "'kubectl krypton quickstart --delete --name try'",
            "its context \"kind-try\" does not exist; its contexts are: production",
        ] {
            assert!(error.contains(expected), "{error}");
        }
        let steps = "creating the kind cluster try\nloading hub:1, app:1\ninstalling the hub\n";
        assert_eq!(out, steps);
        let calls = [
            "get clusters",
            "create cluster --name try --wait 60s",
            "load docker-image hub:1 app:1 --name try",
            "get kubeconfig --name try",
        ];
        assert_eq!(kind.calls(), calls);
    }

    #[tokio::test]
    async fn deletion_removes_only_the_named_cluster() {
        let kind = StubKind::new("'get clusters') printf 'krypton\\nmine\\n';;");
        let (result, _) = kind.quickstart(&["--delete"]).await;
        assert_eq!(result.unwrap().stdout, "kind cluster krypton deleted\n");
        let (result, _) = kind.quickstart(&["--delete", "--name=min"]).await;
        assert_eq!(result.unwrap().stdout, "there is no kind cluster min\n");
        let calls = [
            "get clusters",
            "delete cluster --name krypton",
            "get clusters",
        ];
        assert_eq!(kind.calls(), calls);
    }

    #[tokio::test]
    async fn flags_that_select_a_cluster_are_rejected() {
        let kind = StubKind::new("");
        let cases: [(&[&str], &str); 9] = [
            (&["--context=home"], "takes no --context"),
            (&["--kubeconfig=f"], "takes no --kubeconfig"),
            (&["--as=root"], "takes no --as"),
            (&["--namespace=default"], "takes no --namespace"),
            (&["--hub-namespace=hub"], "takes no --hub-namespace"),
            (&["--chart-repo=https://charts.example.org"], "--chart-name"),
            (&["--delete", "--tenant=acme"], "cannot be used with"),
            (&["--delete", "-f=values.yaml"], "cannot be used with"),
            (&["--tenant=Acme"], "lower-case letters"),
        ];
        for (flags, expected) in cases {
            let (result, _) = kind.quickstart(flags).await;
            let error = result.unwrap_err();
            assert!(error.contains(expected), "{flags:?}: {error}");
        }
        assert!(kind.calls().is_empty());
    }

    #[test]
    fn new_cluster_requires_image_of_hub() {
        let cases: [(&[&str], bool); 5] = [
            (&[], false),
            (&["--set=image.tag=1"], false),
            (&["--set-string=image.registry=r"], true),
            (&["--set=replicaCount=1,image.repository=r/hub"], true),
            (&["--load-image=hub:1"], true),
        ];
        for (flags, is_named) in cases {
            let line = [&["quickstart"][..], flags].concat();
            let args = TestCli::try_parse_from(line).unwrap().quickstart;
            assert_eq!(args.require_image().is_ok(), is_named, "{flags:?}");
        }
    }

    #[test]
    fn second_run_keeps_chart_unless_named() {
        let [repo, name, version] = DEFAULT_CHART;
        let own = [
            "--chart-name=own",
            "--chart-repo=https://charts.example.org",
        ];
        let own_chart = json!({"repo": "https://charts.example.org", "name": "own", "version": ""});
        let default = |version: &str| json!({"repo": repo, "name": name, "version": version});
        let cases: [(&[&str], bool, Value); 6] = [
            (&[], true, default(version)),
            (&[], false, json!({})),
            (&["--chart-version=2"], true, default("2")),
            (&["--chart-version=2"], false, json!({"version": "2"})),
            (&own, true, own_chart.clone()),
            (&own, false, own_chart),
        ];
        for (flags, is_new, expected) in cases {
            let line = [&["quickstart"][..], flags].concat();
            let args = TestCli::try_parse_from(line).unwrap().quickstart;
            assert_eq!(args.hub_values(is_new)["chart"], expected, "{flags:?}");
        }
    }
}
