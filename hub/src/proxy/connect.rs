//! Connects to a member: builds a client and the kubeconfig for Helm, and identifies the cluster.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use jiff::{SignedDuration, Timestamp};
use krypton_runtime::access::{self, ResponseLimits, SwappableClient};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::cluster::ClusterIdentity;
use krypton_runtime::newest::Newest as _;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::{Authority, SanitizedKubeconfig};
use krypton_types::validity::Validity;
use kube::Client;
use parking_lot::Mutex;
use tempfile::TempPath;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::tunnel::permitted_addresses;
use super::{Access, Shared};
use crate::discovery::{Origin, Unresolved};
use crate::home::{self, USER_AGENT};

const RETRY_MAX: Duration = Duration::from_secs(30);
/// Credentials with a shorter lifetime are renewed by programs, so their expiry is not reported.
const LONG_LIVED: SignedDuration = SignedDuration::from_hours(24);
/// Minimum time between two reads of a source that a rejected credential triggers.
const REREAD_EVERY: Duration = Duration::from_secs(10);

/// A connection to a member. Dropping it frees all its resources.
pub(super) struct MemberConnection {
    pub(super) client: Client,
    /// Client with the rights that Helm has on the member.
    pub(super) helm_client: Client,
    /// Replace the access that the two clients use.
    swappable: [SwappableClient; 2],
    kubeconfig: TempPath,
    used: Mutex<Arc<AccessInUse>>,
    /// UID of the cluster that responded; empty before.
    pub(super) uid: String,
}

/// The source through which a member is reached.
pub(super) struct AccessInUse {
    /// Source of the kubeconfig; `None` for the home cluster itself.
    pub(super) origin: Option<Origin>,
    /// Host that the client connects to; `None` for the home cluster, which the operator of the hub configured.
    first_hop: Option<Authority>,
    /// Validity of the credential, if it is known and longer than [`LONG_LIVED`].
    pub(super) validity: Option<Validity>,
    /// Same as [`Access::digest`].
    pub(super) digest: String,
    /// Task that notifies the source when the cluster rejects the credential.
    _refusal_task: AbortOnDropHandle<()>,
}

impl MemberConnection {
    fn new(clients: [Client; 2], kubeconfig: TempPath, used: AccessInUse) -> Self {
        let swappable = clients.map(SwappableClient::new);
        Self {
            client: swappable[0].client(),
            helm_client: swappable[1].client(),
            swappable,
            kubeconfig,
            used: Mutex::new(Arc::new(used)),
            uid: String::new(),
        }
    }

    /// Path of the kubeconfig for Helm.
    pub(super) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    pub(super) fn used(&self) -> Arc<AccessInUse> {
        Arc::clone(&self.used.lock())
    }

    /// Uses the newer access of the same cluster for new calls and Helm runs. Calls and runs in progress keep
    /// the old one. Returns `newer` if it reaches another cluster, has another namespace, or cannot be used.
    pub(super) fn take_over(&self, newer: Self) -> Option<Self> {
        let namespace = |connection: &Self| {
            connection
                .used()
                .origin
                .as_ref()
                .map(|it| it.namespace.clone())
        };
        if self.uid != newer.uid || namespace(self) != namespace(&newer) {
            return Some(newer);
        }
        // Same path: a running Helm has already read the old file.
        if let Err(error) = std::fs::rename(&newer.kubeconfig, &self.kubeconfig) {
            tracing::warn!(%error, "failed to replace the kubeconfig for helm");
            return Some(newer);
        }
        for (current, next) in self.swappable.iter().zip(&newer.swappable) {
            current.replace(next);
        }
        *self.used.lock() = newer.used();
        None
    }
}

/// Builds a client and the kubeconfig file for Helm.
pub(super) async fn prepare(
    name: &str,
    shared: &Arc<Shared>,
    access: Access,
) -> Result<MemberConnection, Unresolved> {
    let digest = access.digest().cloned().unwrap_or_default();
    let (mut first_hop, mut validity) = (None, None);
    let (origin, config) = match access {
        Access::Kubeconfig(_, Err(error)) => return Err(error),
        Access::Kubeconfig(origin, Ok(sanitized)) => {
            let dates = sanitized.check_dates(clock::wall());
            dates.map_err(|error| {
                let message = format!("{origin}: {}", chain(&error));
                Unresolved::new(reason::KUBECONFIG_INVALID, message)
            })?;
            first_hop = Some(sanitized.first_hop().clone());
            validity = validity_of(&sanitized, clock::wall());
            let config = home::member_config(&sanitized.yaml).await;
            let for_helm = match &sanitized.proxy {
                // The operator of the hub has allowed this proxy, and it resolves the server's name.
                Some(_) => sanitized.yaml.clone(),
                None => sanitized.yaml_through(&shared.tunnels.url(&sanitized.authority)),
            };
            let config = config.map(|config| (config, for_helm));
            let config = config.context("the kubeconfig cannot be used");
            (Some(origin), config)
        }
        Access::Home(config) => {
            let yaml = access::kubeconfig_yaml(&config, shared.helm_account.as_ref());
            let config = yaml.map(|yaml| (*config, yaml));
            let problem = "failed to convert the kubeconfig of the home cluster for Helm";
            (None, config.context(problem))
        }
    };
    let connection = config.and_then(|(config, yaml)| {
        let refusal = Arc::new(Notify::new());
        // Helm has a separate service account on the home cluster only.
        let account = shared.helm_account.as_ref().filter(|_| origin.is_none());
        let as_helm = access::impersonating_config(&config, account);
        let on_refusal = Arc::clone(&refusal);
        let client = match &origin {
            None => access::client_notifying_unauthorized(config, USER_AGENT, on_refusal),
            // The hub does not trust a member's API server.
            Some(_) => {
                let limits = ResponseLimits::default();
                let report = oversize_reporter(name, shared);
                access::client_with_limits(config, USER_AGENT, on_refusal, limits, report)
            }
        };
        let failed = "failed to create a client from the kubeconfig";
        let client = client.context(failed)?;
        let helm_client = match as_helm {
            Some(config) => home::client(config).context(failed)?,
            None => client.clone(),
        };
        let kubeconfig = access::write_kubeconfig(&shared.scratch, &yaml);
        let kubeconfig = kubeconfig.with_context(|| {
            let folder = shared.scratch.display();
            format!("failed to write Helm's kubeconfig to {folder}")
        })?;
        let refusal_task = reread_on_refusal(Arc::clone(shared), origin.clone(), refusal);
        let refusal_task = tokio::spawn(refusal_task.in_current_span());
        let used = AccessInUse {
            origin,
            first_hop,
            validity,
            digest,
            _refusal_task: AbortOnDropHandle::new(refusal_task),
        };
        Ok(MemberConnection::new(
            [client, helm_client],
            kubeconfig,
            used,
        ))
    });
    connection.map_err(|error| Unresolved::new(reason::CLIENT_FAILED, chain(&*error)))
}

/// Returns a callback that shows oversized responses in the member's conditions.
pub(super) fn oversize_reporter(name: &str, shared: &Arc<Shared>) -> access::CutOffCallback {
    let (name, members) = (name.to_owned(), Arc::clone(&shared.members));
    Arc::new(move |cut_off| members.oversized_response(&name, cut_off.to_string(), BootTime::now()))
}

fn validity_of(sanitized: &SanitizedKubeconfig, now: Timestamp) -> Option<Validity> {
    let validity = Validity {
        not_before: sanitized.not_before.unwrap_or(now),
        not_after: sanitized.expires?,
    };
    let life = validity.not_after.duration_since(validity.not_before);
    (life >= LONG_LIVED).then_some(validity)
}

/// Makes the source read again when the cluster rejects its credential, because a newer one may exist.
async fn reread_on_refusal(shared: Arc<Shared>, origin: Option<Origin>, refusal: Arc<Notify>) {
    let Some(origin) = origin else { return };
    loop {
        refusal.notified().await;
        tracing::debug!(%origin, "credential rejected; looking for a newer one");
        shared.sources.get().request_reread(&origin);
        tokio::time::sleep(REREAD_EVERY.mul_f64(0.5 + chance::random::<f64>())).await;
    }
}

/// Queries the cluster's identity until it responds. Calls `failed` after each failure.
pub(super) async fn identify(
    shared: &Shared,
    connection: &MemberConnection,
    mut failed: impl FnMut(String),
) -> ClusterIdentity {
    let mut attempts = 0;
    loop {
        let response = {
            // Limits concurrent dialing when the hub connects to a whole fleet for the first time.
            let _permit = shared.connecting.acquire().await;
            match address_problem(shared, connection.used().first_hop.as_ref()).await {
                Some(problem) => Err(problem),
                None => ClusterIdentity::read(&connection.client)
                    .await
                    .map_err(|error| chain(&error)),
            }
        };
        match response {
            Ok(identity) => return identity,
            Err(problem) => failed(problem),
        }
        attempts += 1;
        let pause = krypton_runtime::retry::backoff(attempts, RETRY_MAX, chance::random());
        tokio::time::sleep(pause).await;
    }
}

/// Checks the addresses of a host name before the hub sends a credential there. Another resolver may return
/// other addresses later, and TLS protects that connection.
async fn address_problem(shared: &Shared, first_hop: Option<&Authority>) -> Option<String> {
    let hop = first_hop?;
    let addresses = permitted_addresses(&hop.host, hop.port, &shared.kubeconfig_policy).await;
    addresses.err().map(|refusal| chain(&refusal))
}

pub(super) fn unreachable(problem: String) -> State {
    State::new(Truth::False, reason::UNREACHABLE, problem)
}

#[cfg(test)]
mod tests;
