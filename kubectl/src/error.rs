//! Errors of commands and their exit codes.

mod exit_code;

use krypton_runtime::access::{LocalError, reason_of};
use kube::core::ApiResource;

use crate::commands::join::JoinError;
use crate::commands::replace::ReplaceError;
use crate::commands::rotate_ca::RotateCaError;
use crate::home::Place;
use crate::render::{Printed, one_line};

pub use exit_code::{ExitCode, MEANINGS};

/// Reason why a command failed. One line each, followed by its sources.
#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    /// Invalid usage or a request for help. clap prints it.
    #[error(transparent)]
    Usage(clap::Error),
    #[error("no home cluster")]
    Home(#[source] LocalError),
    #[error("building a client of the home cluster failed")]
    Client(#[source] kube::Error),
    #[error(
        "the cluster {context:?} has no {plural}: it is not a home cluster of Krypton, or its CRDs are not installed yet; choose another with --context or --kubeconfig, or install the CRDs"
    )]
    NoSuchKind { context: String, plural: String },
    #[error("you may not {verb} {plural} {place} on the cluster {context:?}; ask for {missing}")]
    Forbidden {
        context: String,
        verb: &'static str,
        plural: String,
        place: String,
        /// Missing permission, with the API group that a role needs, and the API server's message.
        missing: String,
    },
    #[error("the cluster {context:?} does not accept your credentials; log in again ({message})")]
    Unauthorized { context: String, message: String },
    #[error("the cluster {context:?} did not answer within 30 s; check that it is reachable")]
    TimedOut { context: String },
    #[error(
        "the cluster {context:?} cannot be reached; check that it runs, and the way there ({reason})"
    )]
    Unreachable { context: String, reason: String },
    #[error("{reason}")]
    Release { reason: String },
    #[error("the verb {verb} on {plural} failed on the cluster {context:?}: {reason}")]
    Call {
        context: String,
        verb: &'static str,
        plural: String,
        reason: String,
    },
    #[error("listing {plural} on the cluster {context:?} failed: {reason}")]
    List {
        context: String,
        plural: String,
        reason: String,
    },
    #[error("there is no {what} of the name {name:?} {place} on the cluster {context:?}")]
    NotFound {
        context: String,
        what: String,
        name: String,
        place: String,
    },
    #[error(
        "there is no Tenant {tenant} on the cluster {context:?}; one that was made on a member alone is told of there: give that cluster's --context, or --on MEMBER for what home knows of the member"
    )]
    NoTenant { context: String, tenant: String },
    /// The command explained the Tenant; `printed` has the output.
    #[error("the Tenant is not Ready, or that is not known")]
    NotReady { printed: Printed },
    #[error(
        "no pod of the {program} runs {place} on the cluster {context:?}; name its namespace with -n, or its cluster with --context or --kubeconfig"
    )]
    NoPod {
        context: String,
        program: &'static str,
        place: String,
    },
    #[error("the debug port of {whose} does not answer: {reason}")]
    DebugPort { whose: String, reason: String },
    /// The current state does not allow the operation.
    #[error("{why}")]
    Refused { why: String },
    /// The operation was partly done; `printed` lists the completed part.
    #[error("{error}")]
    Partly {
        printed: Printed,
        error: Box<KubectlError>,
    },
    #[error("writing the output failed: {reason}")]
    Write { reason: String },
    #[error("writing the {format} failed: {reason}")]
    Encode {
        format: &'static str,
        reason: String,
    },
    /// The operation was partly done; `printed` lists the completed part.
    #[error(
        "{left} of the objects were not moved over; the reasons are in the table, and what is done is not done again"
    )]
    Incomplete { printed: Printed, left: usize },
    #[error(transparent)]
    Join(Box<JoinError>),
    #[error(transparent)]
    RotateCa(Box<RotateCaError>),
}

/// Maps the API server's response to `verb` on `kind` to an error for the user.
pub(crate) fn call_failed(
    error: kube::Error,
    verb: &'static str,
    kind: &ApiResource,
    place: &Place,
    context: &str,
) -> KubectlError {
    let (context, plural) = (context.to_owned(), kind.plural.clone());
    let failed = |context, plural, reason| match verb {
        "list" | "watch" => KubectlError::List {
            context,
            plural,
            reason,
        },
        verb => KubectlError::Call {
            context,
            verb,
            plural,
            reason,
        },
    };
    let status = match &error {
        kube::Error::Api(status) => status,
        kube::Error::HyperError(_) | kube::Error::Service(_) => {
            let reason = one_line(&reason_of(&error));
            return KubectlError::Unreachable { context, reason };
        }
        _ => return failed(context, plural, one_line(&reason_of(&error))),
    };
    let message = one_line(&status.message);
    match status.code {
        404 => KubectlError::NoSuchKind { context, plural },
        401 => KubectlError::Unauthorized { context, message },
        403 => {
            let place = place.in_words();
            let resource = match kind.group.as_str() {
                "" => plural.clone(),
                group => format!("{plural}.{group}"),
            };
            let missing = format!("the right to {verb} {resource} ({message})");
            KubectlError::Forbidden {
                context,
                verb,
                plural,
                place,
                missing,
            }
        }
        _ => failed(context, plural, message),
    }
}
