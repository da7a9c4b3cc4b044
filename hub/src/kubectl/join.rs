//! `kubectl krypton join NAME`: a join bundle for a cluster, made with the rights of who runs it.

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use krypton_common::bundle::{BundleError, JoinBundle, split_address};
use krypton_common::names::{self, SELF_CLUSTER};
use krypton_common::spiffe::is_member_name;
use kube::Client;

use super::{HomeArgs, Printed};
use crate::join_info::{self, JoinInfo, JoinInfoError};
use crate::join_token::{self, LONGEST_LIFE, SHORTEST_LIFE, TokenError};
use crate::settings::parse_duration;

/// Where a hub is by convention.
const USUAL_NAMESPACE: &str = "krypton-system";

#[derive(Clone, Debug, Args)]
pub(super) struct Join {
    /// Name of the cluster in the fleet.
    #[arg(value_parser = member_name)]
    name: String,
    /// How long the bundle can be used, 1m to 24h; it can be used by one agent's key only.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = life)]
    ttl: Duration,
    /// Namespace of the hub; by default krypton-system, else that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// HOST:PORT by which the cluster reaches the hub, instead of what the hub advertises; may be repeated.
    #[arg(long = "address", value_name = "HOST:PORT", value_parser = address)]
    addresses: Vec<String>,
    #[command(flatten)]
    pub(super) home: HomeArgs,
}

/// Why there is no bundle.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(
        "the cluster {context:?} has no ConfigMap {name} in {looked}, so no hub of Krypton that agents can join is there; name the hub's namespace with -n, choose its home cluster with --context or --kubeconfig, or start the hub with --listen",
        name = join_info::NAME
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
        name = join_info::NAME
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
    #[error("writing the bundle failed")]
    Encode(#[source] serde_saphyr::ser::Error),
}

pub(super) async fn run(
    join: Join,
    client: Client,
    context: &str,
    context_namespace: &str,
    now: Timestamp,
) -> Result<Printed, JoinError> {
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
    let made = join_token::make(client, &namespace, &bundle.cluster, join.ttl, now)
        .await
        .map_err(|source| JoinError::Token {
            context: context.to_owned(),
            source,
        })?;
    bundle.token = made.token;
    bundle.expires = made.expires;
    let stderr = format!(
        "One agent of cluster {} can join with this until {}. Write it to a file, and run beside that cluster:\n  krypton-agent --join-file FILE\n",
        bundle.cluster, bundle.expires
    );
    let stdout = bundle.to_yaml().map_err(JoinError::Encode)?;
    Ok(Printed { stdout, stderr })
}

/// Where the hub is looked for.
fn places(named: Option<&str>, of_context: &str) -> Vec<String> {
    match named {
        Some(namespace) => vec![namespace.to_owned()],
        None if of_context == USUAL_NAMESPACE => vec![of_context.to_owned()],
        None => vec![USUAL_NAMESPACE.to_owned(), of_context.to_owned()],
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

fn namespace_name(text: &str) -> Result<String, &'static str> {
    match names::is_dns_label(text) {
        true => Ok(text.to_owned()),
        false => Err("write lower-case letters, digits and '-', at most 63 characters"),
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
