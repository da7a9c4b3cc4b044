//! `kubectl krypton join NAME`: creates a join bundle for a cluster, with the user's permissions. Installs the cluster's
//! agent if the command has its context.

mod agent;

use std::time::Duration;

use clap::{Args, ValueEnum};
use futures::future::join_all;
use jiff::Timestamp;
use krypton_runtime::args::go_values::parse_duration;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::error_chain::chain;
use krypton_types::join_bundle::{BundleError, JoinBundle, split_address};
use krypton_types::join_info::{JoinInfo, NAME};
use krypton_types::join_token::{LONGEST_LIFE, SHORTEST_LIFE};
use krypton_types::names::SELF_CLUSTER;
use krypton_types::spiffe::is_member_name;
use serde_json::Value;

use crate::check::{connection_defect, ensure_installable};
use crate::commands::replace::ReplacedMember;
use crate::error::KubectlError;
use crate::helm::{CHART_REGISTRY, ChartValues, HelmArgs};
use crate::home::{Connection, Target};
use crate::objects::poll;
use crate::program::{Program, image_of, pods_of};
use crate::render::CommandOutput;
use crate::{join_info, join_token};

const EXAMPLES: &str = "\
Examples:
  # Let the cluster of a context join, and install the agent there
  kubectl krypton join NAME --agent-context CONTEXT

  # Write a join bundle to a file
  kubectl krypton join NAME > NAME.yaml

  # Let a rebuilt cluster take the name
  kubectl krypton join NAME --replace";

#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Join {
    /// Name of the cluster in the fleet
    #[arg(value_parser = parse_member_name)]
    name: String,
    /// Let a rebuilt cluster take the name: delete the EdgeCluster and create it again with the same spec. Releases on
    /// the previous cluster stay installed. A member that the hub reaches through a kubeconfig, without an agent, gets
    /// no bundle and needs none
    #[arg(long)]
    replace: bool,
    /// Lifetime of the bundle, 1m to 24h. Only one agent's key can use the bundle
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_lifetime)]
    ttl: Duration,
    /// HOST:PORT at which the cluster reaches the hub, instead of the addresses that the hub advertises; repeatable
    #[arg(long = "address", value_name = "HOST:PORT", value_parser = parse_address)]
    addresses: Vec<String>,
    /// Also install the agent, on the cluster of this context, and wait until it is connected
    #[arg(long, value_name = "CONTEXT", conflicts_with = "output")]
    agent_context: Option<String>,
    /// Output: the bundle, or a helm command that contains the bundle
    #[arg(short, long, value_name = "FORMAT", default_value = "bundle")]
    output: BundleFormat,
    /// The agent's Helm chart: a folder, an archive, or a reference that Helm accepts. By default, --agent-context uses
    /// the chart in this program, and the helm command uses charts/krypton-agent. The agent's image has the registry
    /// and tag of the hub's, unless your values set others
    #[arg(long, value_name = "CHART")]
    chart: Option<String>,
    #[command(flatten)]
    values: ChartValues,
    /// Install the agent without the checks of its cluster
    #[arg(long, requires = "agent_context")]
    skip_checks: bool,
    #[command(flatten)]
    helm: HelmArgs,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Longest wait for a hub that starts.
const START_DEADLINE: Duration = Duration::from_secs(60);
const START_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BundleFormat {
    Bundle,
    Helm,
}

pub(crate) async fn run(
    join: Join,
    target: &Target<'_>,
    now: Timestamp,
) -> Result<CommandOutput, KubectlError> {
    let home = target.connect().await?;
    let edge = match &join.agent_context {
        Some(context) => {
            let edge = target.with_context(context);
            let cluster = edge.connect().await?;
            if !join.skip_checks {
                ensure_installable(&cluster, Program::Agent).await?;
            }
            // Before the command replaces the EdgeCluster or creates a token.
            join.helm.check_version().await?;
            Some((edge, cluster))
        }
        None => None,
    };
    let replaced = match join.replace {
        true => Some(ReplacedMember::read(&home, &join.name).await?),
        false => None,
    };
    if let Some(replaced) = replaced
        .as_ref()
        .filter(|replaced| !replaced.needs_bundle())
        && edge.is_none()
    {
        replaced.replace(&home).await?;
        return Ok(CommandOutput {
            stdout: format!("edgecluster.mesh.openkcm.io/{} replaced\n", join.name),
            stderr: replaced.effects(now),
        });
    }
    let (bundle, image) = create_bundle(&join, &home, replaced.as_ref(), now).await?;
    let yaml = bundle.to_yaml().map_err(|error| {
        KubectlError::Failed(format!("writing the bundle failed: {}", chain(&error)))
    })?;
    let values = chart_flags(image.as_deref(), &join.values);
    let image_hint = hint_at_registry(&join, image.as_deref());
    let mut output = match &edge {
        Some((edge, cluster)) => {
            let name = &bundle.cluster;
            // The cluster may reach the hub although this machine does not, so this is only a hint.
            let defect = Box::pin(connection_defect(&bundle, target.env)).await;
            let hints = [
                defect.map(|defect| format!("; a possible cause: {defect}")),
                image_hint.map(|hint| format!("; {hint}")),
            ];
            let hints: String = hints.into_iter().flatten().collect();
            let joining = async {
                let previous = agent::PreviousCertificate::read(&home, &bundle).await?;
                let helm = &join.helm;
                let release = helm.release(Program::Agent, SYSTEM_NAMESPACE, &edge.args);
                agent::install(&release, cluster, &yaml, join.chart.as_deref(), values).await?;
                agent::wait_until_connected(&home, name, &previous, helm.timeout).await
            };
            let replacement_note = match replaced {
                Some(_) => "the EdgeCluster was replaced, and ",
                None => "",
            };
            joining.await.map_err(|error| KubectlError::Interrupted {
                consequence: format!(
                    "{replacement_note}the home cluster has a join token for {name}, but no agent is connected with it; remove the cause and run the command again{hints}"
                ),
                source: Box::new(error),
            })?;
            CommandOutput::stdout(format!("edgecluster.mesh.openkcm.io/{name} connected\n"))
        }
        None => {
            let chart = join.chart.as_deref();
            let mut output = bundle_output(&bundle, yaml, join.output, chart, &values);
            let hint = image_hint.map(|hint| format!("{hint}\n"));
            output.stderr.extend(hint);
            output
        }
    };
    if let Some(replaced) = &replaced {
        output.stderr.insert_str(0, &replaced.effects(now));
    }
    Ok(output)
}

/// Creates the bundle, after it has replaced the EdgeCluster if asked to. Also returns the image of the hub.
async fn create_bundle(
    join: &Join,
    home: &Connection,
    replaced: Option<&ReplacedMember>,
    now: Timestamp,
) -> Result<(JoinBundle, Option<String>), KubectlError> {
    let object = format!("ConfigMap {NAME}");
    let (namespace, info) = find_join_info(home, &object).await?;
    let addresses = match join.addresses.is_empty() {
        true => info.addresses,
        false => join.addresses.clone(),
    };
    if addresses.is_empty() {
        return Err(KubectlError::Refused(format!(
            "the hub in the namespace {namespace} advertises no address; start it with --advertise=HOST:PORT, or name one with --address HOST:PORT"
        )));
    }
    let mut bundle = JoinBundle {
        cluster: join.name.clone(),
        addresses,
        certificate_authority: info.ca_pem,
        token: String::new(),
        expires: now,
    };
    // Before the command creates a token, which would be useless in an invalid bundle.
    check_bundle(&bundle).map_err(|error| {
        KubectlError::Failed(format!(
            "{object} in the namespace {namespace} is invalid; delete it, and the hub writes it again within 10 minutes or after a restart: {}",
            chain(&error)
        ))
    })?;
    let pods = hub_pods(home, &namespace).await;
    let image = pods.iter().find_map(|pod| image_of(pod, Program::Hub));
    if let Some(replaced) = replaced {
        replaced.replace(home).await?;
    }
    let new_token = join_token::create(home, &namespace, &bundle.cluster, join.ttl, now).await?;
    bundle.token = new_token.token;
    bundle.expires = new_token.expires;
    Ok((bundle, image.map(str::to_owned)))
}

/// Returns the hub's namespace and join information. Waits for a hub that has a pod and starts.
async fn find_join_info(
    home: &Connection,
    object: &str,
) -> Result<(String, JoinInfo), KubectlError> {
    let namespaces = home.hub_namespaces();
    let read = async |namespace: &str| join_info::read(home, namespace).await;
    let check = async || match home.search_hub(object, &namespaces, &read).await {
        Err(error @ KubectlError::NotFound(_)) => {
            let pods = namespaces.iter().map(|namespace| hub_pods(home, namespace));
            match join_all(pods).await.concat().is_empty() {
                true => Err(error),
                false => Ok(None),
            }
        }
        result => result.map(Some),
    };
    match poll((START_INTERVAL, START_DEADLINE), check).await? {
        Some(found) => Ok(found),
        None => home.search_hub(object, &namespaces, &read).await,
    }
}

/// The pods of hubs in this namespace. Empty without the right to list pods.
async fn hub_pods(home: &Connection, namespace: &str) -> Vec<Value> {
    let pods = pods_of(home, namespace, Program::Hub).await;
    pods.unwrap_or_default()
}

/// Helm's flags with the registry and the tag of the hub's image, which the agent shares, and with the user's values.
fn chart_flags(image: Option<&str>, values: &ChartValues) -> Vec<[String; 2]> {
    let mut flags = Vec::new();
    if let Some(image) = image {
        let image = image.split('@').next().unwrap_or_default();
        let (registry, name) = image.rsplit_once('/').unwrap_or(("", image));
        let tag = name.split_once(':').map_or("", |(_, tag)| tag);
        // As text, because Helm takes 1.20 for a number.
        let mut set = |key: &str, value: &str| {
            if !values.sets(key) {
                flags.push(["--set-string".to_owned(), format!("{key}={value}")]);
            }
        };
        if !registry.is_empty() {
            set("image.registry", registry);
        }
        // Empty for the chart's own tag. Otherwise the release would keep the tag of an earlier installation.
        set("image.tag", if tag == VERSION { "" } else { tag });
    }
    flags.extend(values.flags());
    flags
}

/// Returns the fix if the agent's image is not found, or `None` if the registry is known.
fn hint_at_registry(join: &Join, image: Option<&str>) -> Option<&'static str> {
    let is_known = image.is_some()
        || join.chart.is_some()
        || CHART_REGISTRY.is_some()
        || join.values.sets("image.registry");
    (!is_known).then_some(
        "the image of the hub is unknown, because you may not list its pods or it runs outside of pods; if the agent's image is not found, add --set image.registry=REGISTRY",
    )
}

/// Puts the bundle, in either form, on standard output, and the next step on standard error.
fn bundle_output(
    bundle: &JoinBundle,
    yaml: String,
    format: BundleFormat,
    chart: Option<&str>,
    values: &[[String; 2]],
) -> CommandOutput {
    let JoinBundle {
        cluster, expires, ..
    } = bundle;
    let validity = format!("One agent of cluster {cluster} can join with this until {expires}.");
    let quote = |args: &[String; 2]| format!(" {} {}", args[0], quoted(&args[1]));
    let values: String = values.iter().map(quote).collect();
    match format {
        BundleFormat::Bundle => {
            let chart = chart.map(|chart| format!(" --chart {}", quoted(chart)));
            let chart = chart.unwrap_or_default();
            CommandOutput {
                stdout: yaml,
                stderr: format!(
                    "{validity} Write it to {cluster}.yaml and run, with the kubeconfig of that cluster:\n  \
                     kubectl krypton install agent --bundle {cluster}.yaml{chart}{values}\nor, without a pod:\n  \
                     krypton-agent --join-file {cluster}.yaml\n"
                ),
            }
        }
        BundleFormat::Helm => {
            let chart = quoted(chart.unwrap_or("charts/krypton-agent"));
            let lines: String = yaml.lines().map(|line| format!("    {line}\n")).collect();
            CommandOutput {
                stdout: format!(
                    "helm upgrade --install krypton-agent {chart} --namespace {SYSTEM_NAMESPACE} --create-namespace{values} \
                     --values - <<'END-OF-BUNDLE'\njoin:\n  bundle: |\n{lines}END-OF-BUNDLE\n"
                ),
                stderr: format!("{validity} Run it with the kubeconfig of that cluster.\n"),
            }
        }
    }
}

/// Quotes an argument for a shell if needed.
fn quoted(arg: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-:@+=,".contains(c);
    match !arg.is_empty() && arg.chars().all(is_plain) {
        true => arg.to_owned(),
        false => format!("'{}'", arg.replace('\'', r"'\''")),
    }
}

fn check_bundle(bundle: &JoinBundle) -> Result<(), BundleError> {
    bundle.roots()?;
    match bundle
        .addresses
        .iter()
        .find(|address| split_address(address).is_none())
    {
        Some(address) => Err(BundleError::Address(address.clone())),
        None => Ok(()),
    }
}

fn parse_member_name(text: &str) -> Result<String, &'static str> {
    match text {
        SELF_CLUSTER => Err("this is the hub's own home cluster, which needs no agent"),
        _ if is_member_name(text) => Ok(text.to_owned()),
        _ => Err(
            "write lower-case letters, digits, '-' and '.', at most 63 characters, with a letter or digit at both ends",
        ),
    }
}

fn parse_lifetime(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text)
        .filter(|lifetime| (SHORTEST_LIFE..=LONGEST_LIFE).contains(lifetime))
        .ok_or("write a duration from 1m to 24h, as 30m or 1h")
}

fn parse_address(text: &str) -> Result<String, &'static str> {
    match split_address(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("write a host and a port, as hub.example.org:7443"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::tool::temporary_file;

    fn example_bundle() -> JoinBundle {
        JoinBundle {
            cluster: "edge-1".to_owned(),
            addresses: vec!["hub:7443".to_owned()],
            certificate_authority: "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
                .to_owned(),
            token: format!("{}.{}", "a".repeat(16), "0".repeat(64)),
            expires: Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    fn values(args: &[&str]) -> ChartValues {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            values: ChartValues,
        }
        let command: Command = clap::Parser::parse_from(["test"].iter().chain(args));
        command.values
    }

    #[test]
    fn pasted_command_passes_bundle_to_helm_unchanged() {
        let yaml = example_bundle().to_yaml().unwrap();
        let output = bundle_output(
            &example_bundle(),
            yaml,
            BundleFormat::Helm,
            Some("the charts/krypton-agent"),
            &chart_flags(
                Some("example.org/krypton-hub:1.20"),
                &values(&["--set=hub={a:1}", "-f=my values"]),
            ),
        );
        let (command, rest) = output.stdout.split_once('\n').unwrap();
        assert_eq!(
            command,
            "helm upgrade --install krypton-agent 'the charts/krypton-agent' --namespace \
             krypton-system --create-namespace --set-string image.registry=example.org \
             --set-string image.tag=1.20 --values 'my values' --set 'hub={a:1}' --values - <<'END-OF-BUNDLE'"
        );
        let values = rest.strip_suffix("END-OF-BUNDLE\n").unwrap();
        let values: Value = serde_saphyr::from_str(values).unwrap();
        let inner = values["join"]["bundle"].as_str().unwrap();
        assert_eq!(JoinBundle::parse(inner).unwrap(), example_bundle());
    }

    #[test]
    fn agent_uses_registry_and_tag_of_hub() {
        let own_tag = values(&["--set=image.tag=a,image.registry=b", "--set-string=x=y"]);
        let file = temporary_file("values", "image: {registry: mirror}").unwrap();
        let file = file.path().to_str().unwrap();
        let own_registry = values(&["-f", file]);
        let tag_and_file = format!("image.tag=1.20 {file}");
        let none = ChartValues::default();
        let own_version = concat!("r/krypton-hub:", env!("CARGO_PKG_VERSION"));
        let by_digest = "registry.example.org:5000/team/krypton-hub:1.20@sha256:ab";
        for (image, values, expected) in [
            ("krypton-hub", &none, "image.tag="),
            ("krypton-hub:nightly", &none, "image.tag=nightly"),
            (own_version, &none, "image.registry=r image.tag="),
            (
                by_digest,
                &none,
                "image.registry=registry.example.org:5000/team image.tag=1.20",
            ),
            (by_digest, &own_registry, &tag_and_file),
            (by_digest, &own_tag, "image.tag=a,image.registry=b x=y"),
        ] {
            let flags = chart_flags(Some(image), values);
            let values: Vec<&str> = flags.iter().map(|[_, value]| value.as_str()).collect();
            assert_eq!(values.join(" "), expected, "{image}");
        }
        assert!(chart_flags(None, &none).is_empty());
    }

    #[test]
    fn shell_argument_is_quoted_only_when_needed() {
        for (arg, expected) in [
            ("charts/krypton-agent", "charts/krypton-agent"),
            (
                "oci://registry.example.org/a:1",
                "oci://registry.example.org/a:1",
            ),
            ("", "''"),
            ("it's", r"'it'\''s'"),
            ("$(reboot)", "'$(reboot)'"),
        ] {
            assert_eq!(quoted(arg), expected);
        }
    }
}
