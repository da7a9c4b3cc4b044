//! Runs the real agent binary against an edge cluster.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, anyhow};
use krypton_agent::session::connect::Dialer;
use krypton_hub::ca::Authority;
use krypton_runtime::{
    clock,
    tls::{self, Credential},
};
use krypton_types::validity::AGENT_CERTIFICATE_LIFE;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::PrivateKeyDer;

use crate::{
    daemon::{Daemon, DaemonStart, Program},
    fleet::SYSTEM_NAMESPACE,
    wait::STEP_DEADLINE,
};

const PROGRAM: Program = Program {
    name: "krypton-agent",
    variable: "KRYPTON_AGENT_BIN",
};
/// Stays the same across restarts, like the pod name in a StatefulSet.
const REPLICA: &str = "one";

/// How to start an agent.
#[derive(Debug, Clone)]
pub struct AgentOptions<'a> {
    /// Kubeconfig of the edge cluster.
    pub edge: &'a Path,
    /// An agent that has already enrolled doesn't need one.
    pub join_file: Option<&'a Path>,
    /// Appended to the harness's flags. A flag given here replaces the harness's flag of the same name.
    pub args: Vec<String>,
    /// The complete environment, except PATH and TMPDIR. If `POD_NAME` or `POD_NAMESPACE` is set, the harness omits the
    /// corresponding flag.
    pub env: BTreeMap<String, String>,
    is_contained: bool,
}

impl<'a> AgentOptions<'a> {
    pub fn new(edge: &'a Path) -> Self {
        Self {
            edge,
            join_file: None,
            args: Vec::new(),
            env: BTreeMap::new(),
            is_contained: false,
        }
    }

    /// Runs the agent as the only container of the pod with this UID. The agent becomes the first process of a PID
    /// namespace, and all other processes of the namespace die with it. Kill it instead of stopping it, because SIGTERM
    /// goes to the process outside the namespace. Requires a kernel that allows user namespaces.
    #[must_use]
    pub fn in_pod(mut self, uid: &str) -> Self {
        self.env.insert("POD_UID".to_owned(), uid.to_owned());
        self.is_contained = true;
        self
    }

    #[must_use]
    pub fn join_file(mut self, bundle: &'a Path) -> Self {
        self.join_file = Some(bundle);
        self
    }

    #[must_use]
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    #[must_use]
    pub fn env(mut self, env: impl IntoIterator<Item = (String, String)>) -> Self {
        self.env.extend(env);
        self
    }
}

/// A running agent. Its environment contains no access to a cluster.
#[derive(Debug)]
pub struct Agent(Daemon);

impl Agent {
    /// Returns the path of the agent binary, which is also the supervisor that runs Helm.
    pub fn program() -> Result<PathBuf> {
        PROGRAM.find()
    }

    /// Starts the agent binary from `KRYPTON_AGENT_BIN`, or from the directory of this executable.
    ///
    /// Doesn't wait until the agent has enrolled and is ready: use `wait_ready`. Use `wait` if the test expects a refusal.
    pub fn start(options: &AgentOptions<'_>) -> Result<Self> {
        let mut flags: Vec<(&str, OsString)> = vec![
            ("--kubeconfig", options.edge.into()),
            ("--retry-max", "5s".into()),
        ];
        for (variable, flag, value) in [
            ("POD_NAMESPACE", "--namespace", SYSTEM_NAMESPACE),
            ("POD_NAME", "--replica", REPLICA),
        ] {
            if !options.env.contains_key(variable) {
                flags.push((flag, value.into()));
            }
        }
        flags.extend(options.join_file.map(|file| ("--join-file", file.into())));
        let daemon = Daemon::start(DaemonStart {
            program: PROGRAM,
            flags,
            cache_flag: Some("--cache-dir"),
            args: &options.args,
            env: options
                .env
                .iter()
                .map(|(name, value)| (name.clone(), value.into()))
                .collect(),
            disk: None,
            is_contained: options.is_contained,
        })?;
        Ok(Self(daemon))
    }

    /// Like `start`. Waits until the agent is ready.
    pub async fn start_ready(options: &AgentOptions<'_>) -> Result<Self> {
        let mut agent = Self::start(options)?;
        agent.wait_ready(STEP_DEADLINE).await?;
        Ok(agent)
    }
}

/// Returns a dialer with its own key and certificate for this member, as after enrollment.
pub fn enrolled_dialer(
    authority: &Authority,
    (name, uid): (&str, &str),
    hub: &str,
) -> Result<Arc<Dialer>> {
    let key = KeyPair::generate().context("generating a key")?;
    let request = CertificateParams::default().serialize_request(&key)?;
    let (now, lifetime) = (clock::wall(), AGENT_CERTIFICATE_LIFE);
    let certificates = authority.sign_agent(request.der(), name, uid, now, lifetime)?;
    let key = PrivateKeyDer::try_from(key.serialize_der())
        .map_err(|error| anyhow!("reading a key: {error}"))?;
    let credential = Credential { certificates, key };
    let tls = tls::client_config(&authority.roots(), Some(credential))?;
    Ok(Arc::new(Dialer::new(vec![hub.to_owned()], tls)))
}

// A hub and an agent differ only in how they start.
impl Deref for Agent {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.0
    }
}

impl DerefMut for Agent {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.0
    }
}
