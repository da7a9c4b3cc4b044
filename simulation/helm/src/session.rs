//! State of one Helm run.

use parking_lot::Mutex;

use crate::api::{Api, Object};
use crate::arguments::Flags;
use crate::fault::HelmError;
use crate::objects::{Owner, WriteMethod};
use crate::release::Release;
use crate::store::Store;

/// One Helm run: the cluster, the flags, and the output so far.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) api: Api,
    pub(crate) flags: Flags,
    pub(crate) release: String,
    pub(crate) stdout: Mutex<String>,
    pub(crate) stderr: Mutex<String>,
}

impl Session {
    /// Returns the storage. `max_history` of 0 removes no revision.
    pub(crate) fn store(&self, max_history: usize) -> Store<'_> {
        Store {
            api: &self.api,
            namespace: &self.flags.namespace,
            max_history,
        }
    }

    pub(crate) fn owner(&self) -> Owner<'_> {
        Owner {
            release: &self.release,
            namespace: &self.flags.namespace,
        }
    }

    /// Returns the method by which this run writes objects.
    pub(crate) fn write_method(&self) -> WriteMethod {
        let force = self.flags.force_conflicts;
        match self.flags.server_side {
            Some(false) => WriteMethod::ClientSide,
            _ => WriteMethod::ServerSide { force },
        }
    }

    /// Reads the objects of a manifest. An error contains the kind of the manifest.
    pub(crate) async fn build(&self, manifest: &str, kind: &str) -> Result<Vec<Object>, HelmError> {
        let built = self.api.build(manifest, &self.flags.namespace).await;
        built.map_err(|error| {
            error.context(format_args!(
                "unable to build kubernetes objects from {kind} manifest"
            ))
        })
    }

    /// Stores the state of a release. Helm ignores errors here.
    pub(crate) async fn record(&self, release: &Release) {
        if let Err(error) = self.store(0).update(release).await {
            self.log("WARN", "failed to update release", &error.message);
        }
    }

    /// Writes a line to standard error.
    pub(crate) fn log(&self, level: &str, message: &str, error: &str) {
        let line = format!(
            "level={level} msg=\"{message}\" name={} error={error:?}\n",
            self.release
        );
        append(&self.stderr, &line);
    }

    pub(crate) fn print(&self, text: &str) {
        append(&self.stdout, text);
    }
}

pub(crate) fn append(output: &Mutex<String>, text: &str) {
    output.lock().push_str(text);
}
