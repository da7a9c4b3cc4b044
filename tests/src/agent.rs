//! The real agent binary beside an edge cluster.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
};

use anyhow::Result;

use crate::{
    daemon::{Daemon, Program, Start},
    fleet::SYSTEM_NAMESPACE,
};

const PROGRAM: Program = Program {
    name: "krypton-agent",
    variable: "KRYPTON_AGENT_BIN",
};
/// The same after a restart, as a pod of a StatefulSet has it.
const REPLICA: &str = "one";

/// How to start an agent.
#[derive(Debug, Clone)]
pub struct AgentOptions<'a> {
    /// Kubeconfig of the edge cluster.
    pub edge: &'a Path,
    /// Not needed by one that has enrolled before.
    pub join_file: Option<&'a Path>,
    /// After the harness' own, which are left out where one of these is the same flag.
    pub args: Vec<String>,
    /// All of its environment but PATH and TMPDIR. What a pod is told by `POD_NAME` and
    /// `POD_NAMESPACE` the harness leaves out of its flags.
    pub env: BTreeMap<String, String>,
    contained: bool,
}

impl<'a> AgentOptions<'a> {
    pub fn new(edge: &'a Path) -> Self {
        Self {
            edge,
            join_file: None,
            args: Vec::new(),
            env: BTreeMap::new(),
            contained: false,
        }
    }

    /// As the one container of the pod with this UID: the first process of a PID namespace, whose other
    /// processes die with it. To be killed, not stopped: a signal to end is for the process outside of it.
    /// The kernel must allow user namespaces.
    #[must_use]
    pub fn in_pod(mut self, uid: &str) -> Self {
        self.env.insert("POD_UID".to_owned(), uid.to_owned());
        self.contained = true;
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

/// A running agent: a `Daemon` with nothing in its environment that leads to a cluster.
#[derive(Debug)]
pub struct Agent(Daemon);

impl Agent {
    /// The program, which is also the supervisor that helm is run under.
    ///
    /// # Errors
    /// When it is not built, saying what builds it.
    pub fn program() -> Result<PathBuf> {
        PROGRAM.find()
    }

    /// Starts the agent of `KRYPTON_AGENT_BIN`, or the one that cargo has put beside this
    /// executable. Does not wait for it to be ready, which it is once it has enrolled: see `ready`,
    /// and `wait` for one that is to refuse.
    ///
    /// # Errors
    /// When there is no such binary, saying what builds it, or it cannot be started.
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
        let daemon = Daemon::start(Start {
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
            contained: options.contained,
        })?;
        Ok(Self(daemon))
    }
}

// Nothing but the way it is started sets it apart from a hub.
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
