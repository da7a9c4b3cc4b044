//! `join --agent-context`: installs the agent on its cluster, and waits until it is connected with the new bundle.

use std::time::Duration;

use jiff::Timestamp;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use krypton_types::join_bundle::JoinBundle;
use krypton_types::validity::Validity;
use kube::api::DynamicObject;

use crate::check::validities;
use crate::commands::install::bundle_flag;
use crate::error::KubectlError;
use crate::helm::ChartRelease;
use crate::home::Connection;
use crate::objects::condition;
use crate::program::Program;
use crate::render::text_at;
use crate::tool::temporary_file;

const INTERVAL: Duration = Duration::from_secs(2);

/// The certificate of the member's agent before it uses the new bundle. An agent whose bundle is refused stays connected
/// with it.
#[derive(Debug)]
pub(super) struct PreviousCertificate {
    expiry: Option<String>,
    /// The next certificate expires at the same time, because none outlives the CA.
    ends_with_ca: bool,
}

impl PreviousCertificate {
    pub(super) async fn read(home: &Connection, bundle: &JoinBundle) -> Result<Self, KubectlError> {
        let member = home.members().find(&bundle.cluster).await?;
        let expiry = member.as_ref().and_then(certificate_expiry);
        Ok(Self::new(
            expiry,
            &validities(&bundle.certificate_authority),
        ))
    }

    fn new(expiry: Option<String>, roots: &[Validity]) -> Self {
        let end: Option<Timestamp> = expiry.as_ref().and_then(|expiry| expiry.parse().ok());
        let ends_with_ca = roots.iter().any(|root| Some(root.not_after) == end);
        Self {
            expiry,
            ends_with_ca,
        }
    }

    /// Returns whether an agent has connected with another certificate, as far as the member's status shows it.
    fn is_replaced(&self, member: &DynamicObject) -> bool {
        let expiry = certificate_expiry(member);
        self.ends_with_ca || (expiry.is_some() && expiry != self.expiry)
    }
}

/// Installs the agent with this bundle. `values` are Helm's own flags.
pub(super) async fn install(
    release: &ChartRelease<'_>,
    cluster: &Connection,
    bundle: &str,
    chart: Option<&str>,
    mut values: Vec<[String; 2]>,
) -> Result<(), KubectlError> {
    let file = temporary_file("the bundle", bundle)?;
    values.push(bundle_flag(&file));
    release.install(cluster, chart, &values).await.map(drop)
}

/// Waits until the home cluster shows the member as connected, with another certificate than before.
pub(super) async fn wait_until_connected(
    home: &Connection,
    name: &str,
    previous: &PreviousCertificate,
    deadline: Duration,
) -> Result<(), KubectlError> {
    let members = home.members();
    let mut shows_connection = false;
    let check = |member: Option<DynamicObject>| {
        let connected = member.filter(is_connected);
        shows_connection = connected.is_some();
        let joined = connected.filter(|member| previous.is_replaced(member));
        Ok(joined.map(drop))
    };
    let joined = members.wait_for(name, (INTERVAL, deadline), check).await?;
    joined.ok_or_else(|| {
        let seconds = deadline.as_secs();
        let problem = match shows_connection {
            true => format!(
                "the agent of {name} is installed, but has not connected with the new bundle within {seconds} s, and the member is connected without it"
            ),
            false => format!(
                "the agent of {name} is installed, but has not connected to the hub within {seconds} s"
            ),
        };
        KubectlError::NoResponse(format!(
            "{problem}; look at its log: kubectl -n {SYSTEM_NAMESPACE} logs deployment/{}, with the context of its cluster",
            Program::Agent.container()
        ))
    })
}

fn is_connected(member: &DynamicObject) -> bool {
    condition(member, "Connected").is_some_and(|connected| connected["status"] == "True")
}

/// The time at which the certificate of the last session expires.
fn certificate_expiry(member: &DynamicObject) -> Option<String> {
    text_at(&member.data, "/status/certificateExpiry")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tests::cluster;

    #[test]
    fn only_another_certificate_shows_new_session() {
        let member = |expiry: Option<&str>| -> DynamicObject {
            let status = json!({ "certificateExpiry": expiry });
            serde_json::from_value(cluster("edge-1", json!({}), status)).unwrap()
        };
        let ca_end = "2026-01-09T00:00:00Z";
        let roots = [Validity::until(ca_end.parse().unwrap())];
        let (first, last) = (Some("2026-01-05T00:00:00Z"), Some(ca_end));
        for (previous, current, is_replaced) in [
            (None, None, false),
            (None, first, true),
            (first, first, false),
            (first, last, true),
            // A new certificate ends with the CA, too.
            (last, last, true),
        ] {
            let previous = PreviousCertificate::new(previous.map(str::to_owned), &roots);
            let found = previous.is_replaced(&member(current));
            assert_eq!(found, is_replaced, "{previous:?} {current:?}");
        }
    }
}
