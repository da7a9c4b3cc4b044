//! `kubectl krypton join NAME`: a join bundle for a cluster, made with the rights of who runs it.

use std::time::Duration;

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use krypton_runtime::args::go_values::parse_duration;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::join_bundle::{BundleError, JoinBundle, split_address};
use krypton_types::join_info::{JoinInfo, NAME};
use krypton_types::join_token::{LONGEST_LIFE, SHORTEST_LIFE};
use krypton_types::names::{SELF_CLUSTER, namespace_name};
use krypton_types::spiffe::is_member_name;
use kube::Client;

use crate::commands::replace::Old;
pub(crate) use crate::commands::replace::ReplaceError;

use crate::home::HomeArgs;
use crate::join_info::{self, JoinInfoError};
use crate::join_token::{self, TokenError};
use crate::render::Printed;

/// Where our pages install the hub.
const USUAL_NAMESPACE: &str = "krypton";

#[derive(Clone, Debug, Args)]
pub(crate) struct Join {
    /// Name of the cluster in the fleet.
    #[arg(value_parser = member_name)]
    name: String,
    /// The cluster was rebuilt: its EdgeCluster is deleted and made anew with the same spec, so that the
    /// new cluster can take the name. What is installed on the former one stays there. A member that the
    /// hub reaches by a kubeconfig, without an agent, needs no bundle, and none is made.
    #[arg(long)]
    replace: bool,
    /// How long the bundle can be used, 1m to 24h; it can be used by one agent's key only.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = life)]
    ttl: Duration,
    /// Namespace of the hub; by default krypton-system, else krypton, else that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// HOST:PORT by which the cluster reaches the hub, instead of what the hub advertises; may be repeated.
    #[arg(long = "address", value_name = "HOST:PORT", value_parser = address)]
    addresses: Vec<String>,
    /// What is printed: the bundle, or a helm command with the bundle in it, ready to be pasted.
    #[arg(short, long, value_name = "FORMAT", default_value = "bundle")]
    output: Format,
    /// The agent's Helm chart in that command: a folder, an archive, or a reference that helm knows.
    #[arg(long, value_name = "CHART", default_value = "charts/krypton-agent")]
    chart: String,
    /// A value for that chart, as helm's --set; may be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    values: Vec<String>,
    #[command(flatten)]
    pub(crate) home: HomeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Bundle,
    Helm,
}

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(
        "the cluster {context:?} has no ConfigMap {name} in {looked}, so no hub of Krypton that agents can join is there; name the hub's namespace with -n, choose its home cluster with --context or --kubeconfig, or start the hub with --listen",
        name = NAME
    )]
    NoHub { context: String, looked: String },
    #[error(
        "looking for the hub on the cluster {context:?} failed; you need the verb get on configmaps in its namespace"
    )]
    Look {
        context: String,
        #[source]
        source: JoinInfoError,
    },
    #[error(
        "the hub in the namespace {namespace} advertises no address; start it with --advertise=HOST:PORT, or name one with --address HOST:PORT"
    )]
    NoAddress { namespace: String },
    #[error(
        "ConfigMap {namespace}/{name} cannot be used; delete it and the hub writes it again, which takes up to 10 minutes or a restart of the hub",
        name = NAME
    )]
    Info {
        namespace: String,
        #[source]
        source: BundleError,
    },
    #[error("making the join token on the cluster {context:?} failed")]
    Token {
        context: String,
        #[source]
        source: TokenError,
    },
    #[error(transparent)]
    Replace(#[from] ReplaceError),
    #[error("writing the bundle failed")]
    Encode(#[source] serde_saphyr::ser::Error),
}

pub(crate) async fn run(
    join: Join,
    client: Client,
    context: &str,
    context_namespace: &str,
    now: Timestamp,
) -> Result<Printed, JoinError> {
    let old = match join.replace {
        true => Some(Old::read(&client, &join.name).await?),
        false => None,
    };
    if let Some(old) = old.as_ref().filter(|old| !old.needs_bundle()) {
        old.replace(&client).await?;
        return Ok(Printed {
            stdout: format!("edgecluster.mesh.openkcm.io/{} replaced\n", join.name),
            stderr: old.said(now),
        });
    }
    let places = places(join.namespace.as_deref(), context_namespace);
    let (namespace, info) = find(&client, &places, context).await?;
    let addresses = match join.addresses.is_empty() {
        true => info.addresses,
        false => join.addresses,
    };
    if addresses.is_empty() {
        return Err(JoinError::NoAddress { namespace });
    }
    let mut bundle = JoinBundle {
        cluster: join.name,
        addresses,
        certificate_authority: info.ca_pem,
        token: String::new(),
        expires: now,
    };
    // Before the token is made, which would be of no use in a bundle that cannot be read.
    if let Err(source) = check(&bundle) {
        return Err(JoinError::Info { namespace, source });
    }
    if let Some(old) = &old {
        old.replace(&client).await?;
    }
    let made = join_token::make(client, &namespace, &bundle.cluster, join.ttl, now)
        .await
        .map_err(|source| JoinError::Token {
            context: context.to_owned(),
            source,
        })?;
    bundle.token = made.token;
    bundle.expires = made.expires;
    let yaml = bundle.to_yaml().map_err(JoinError::Encode)?;
    let mut printed = printed(&bundle, yaml, join.output, &join.chart, &join.values);
    if let Some(old) = &old {
        printed.stderr.insert_str(0, &old.said(now));
    }
    Ok(printed)
}

/// The bundle on standard output, in either form; what to do with it on the other.
fn printed(
    bundle: &JoinBundle,
    yaml: String,
    format: Format,
    chart: &str,
    values: &[String],
) -> Printed {
    let JoinBundle {
        cluster, expires, ..
    } = bundle;
    let once = format!("One agent of cluster {cluster} can join with this until {expires}.");
    let mut install = format!(
        "helm upgrade --install krypton-agent {} --namespace {SYSTEM_NAMESPACE} --create-namespace",
        quoted(chart)
    );
    for value in values {
        install.push_str(" --set ");
        install.push_str(&quoted(value));
    }
    match format {
        Format::Bundle => Printed {
            stdout: yaml,
            stderr: format!(
                "{once} Write it to {cluster}.yaml and run, with the kubeconfig of that cluster:\n  \
                 {install} --set-file join.bundle={cluster}.yaml\nor beside it, without a pod:\n  \
                 krypton-agent --join-file {cluster}.yaml\n"
            ),
        },
        Format::Helm => {
            let mut stdout =
                format!("{install} --values - <<'END-OF-BUNDLE'\njoin:\n  bundle: |\n");
            for line in yaml.lines() {
                stdout.push_str("    ");
                stdout.push_str(line);
                stdout.push('\n');
            }
            stdout.push_str("END-OF-BUNDLE\n");
            Printed {
                stdout,
                stderr: format!("{once} Run it with the kubeconfig of that cluster.\n"),
            }
        }
    }
}

/// For a shell, where it is more than a plain word.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:@+=,".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Where the hub is looked for.
pub(crate) fn places(named: Option<&str>, of_context: &str) -> Vec<String> {
    match named {
        Some(namespace) => vec![namespace.to_owned()],
        None => {
            let mut places = vec![SYSTEM_NAMESPACE.to_owned(), USUAL_NAMESPACE.to_owned()];
            if !places.iter().any(|place| place == of_context) {
                places.push(of_context.to_owned());
            }
            places
        }
    }
}

async fn find(
    client: &Client,
    places: &[String],
    context: &str,
) -> Result<(String, JoinInfo), JoinError> {
    let mut forbidden = None;
    for namespace in places {
        match join_info::read(client.clone(), namespace).await {
            Ok(Some(info)) => return Ok((namespace.clone(), info)),
            Ok(None) => {}
            // It may be in the next one.
            Err(error) if error.is_forbidden() => forbidden = forbidden.or(Some(error)),
            Err(source) => {
                return Err(JoinError::Look {
                    context: context.to_owned(),
                    source,
                });
            }
        }
    }
    let context = context.to_owned();
    Err(match forbidden {
        Some(source) => JoinError::Look { context, source },
        None => JoinError::NoHub {
            context,
            looked: match places {
                [one] => format!("the namespace {one}"),
                all => format!("the namespaces {}", all.join(" and ")),
            },
        },
    })
}

fn check(bundle: &JoinBundle) -> Result<(), BundleError> {
    bundle.roots()?;
    match bundle
        .addresses
        .iter()
        .find(|address| split_address(address).is_none())
    {
        Some(wrong) => Err(BundleError::Address(wrong.clone())),
        None => Ok(()),
    }
}

fn member_name(text: &str) -> Result<String, &'static str> {
    match text {
        SELF_CLUSTER => Err("that is the hub's own home cluster, which needs no agent"),
        _ if is_member_name(text) => Ok(text.to_owned()),
        _ => Err(
            "write lower-case letters, digits, '-' and '.', at most 63 characters, with a letter or digit at both ends",
        ),
    }
}

fn life(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text)
        .filter(|life| (SHORTEST_LIFE..=LONGEST_LIFE).contains(life))
        .ok_or("write a duration from 1m to 24h, as 30m or 1h")
}

fn address(text: &str) -> Result<String, &'static str> {
    match split_address(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("write a host and a port, as hub.example.org:7443"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn bundle() -> JoinBundle {
        JoinBundle {
            cluster: "edge-1".to_owned(),
            addresses: vec!["hub:7443".to_owned()],
            certificate_authority: "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
                .to_owned(),
            token: format!("{}.{}", "a".repeat(16), "0".repeat(64)),
            expires: Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    #[test]
    fn pasted_command_passes_bundle_to_helm_unchanged() {
        let yaml = bundle().to_yaml().unwrap();
        let printed = printed(
            &bundle(),
            yaml,
            Format::Helm,
            "the charts/krypton-agent",
            &[
                "image.registry=example.org".to_owned(),
                "hub={a:1}".to_owned(),
            ],
        );
        let (command, rest) = printed.stdout.split_once('\n').unwrap();
        assert_eq!(
            command,
            "helm upgrade --install krypton-agent 'the charts/krypton-agent' --namespace \
             krypton-system --create-namespace --set image.registry=example.org --set 'hub={a:1}' \
             --values - <<'END-OF-BUNDLE'"
        );
        let values = rest.strip_suffix("END-OF-BUNDLE\n").unwrap();
        let values: Value = serde_saphyr::from_str(values).unwrap();
        let inner = values["join"]["bundle"].as_str().unwrap();
        assert_eq!(JoinBundle::parse(inner).unwrap(), bundle());
    }

    #[test]
    fn shell_argument_is_quoted_only_when_needed() {
        for (word, expected) in [
            ("charts/krypton-agent", "charts/krypton-agent"),
            (
                "oci://registry.example.org/a:1",
                "oci://registry.example.org/a:1",
            ),
            ("", "''"),
            ("it's", r"'it'\''s'"),
            ("$(reboot)", "'$(reboot)'"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }
}
