//! Renders a kubeconfig for Helm from a client's configuration.

use std::io::Write;
use std::path::{Path, PathBuf};

use k8s_openapi::ByteString;
use kube::Config;
use kube::config::{AuthInfo, Cluster};
use serde_json::json;
use tempfile::TempPath;

use super::ServiceAccount;
use super::service_account::impersonate;

const NAME: &str = "self";
const PEM_LINE: usize = 64;

/// Why a configuration cannot be rendered as a kubeconfig.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error("reading the client certificate or key {path} for the kubeconfig of helm failed", path = path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("failed to write Helm's kubeconfig")]
    Encode(#[source] serde_json::Error),
}

/// Returns a kubeconfig with the same access as `config`, in JSON, which is YAML. Contains credentials.
///
/// Certificates and keys are inline. A token file stays a path, as its content changes every few minutes. TLS is
/// verified unless `config` disables verification.
///
/// A client that uses the kubeconfig acts as `account`, if set.
pub fn kubeconfig_yaml(
    config: &Config,
    account: Option<&ServiceAccount>,
) -> Result<String, RenderError> {
    let mut user = with_inline_files(config.auth_info.clone())?;
    if let Some(account) = account {
        impersonate(&mut user, account);
    }
    let cluster = Cluster {
        server: Some(config.cluster_url.to_string()),
        insecure_skip_tls_verify: config.accept_invalid_certs.then_some(true),
        // Helm rejects a CA together with insecure-skip-tls-verify.
        certificate_authority_data: config
            .root_cert
            .as_ref()
            .filter(|_| !config.accept_invalid_certs)
            .map(|certificates| base64(pem(certificates).into_bytes())),
        tls_server_name: config.tls_server_name.clone(),
        proxy_url: config.proxy_url.as_ref().map(ToString::to_string),
        ..Default::default()
    };
    let context = json!({"cluster": NAME, "user": NAME, "namespace": config.default_namespace});
    let cluster = serde_json::to_value(cluster).map_err(RenderError::Encode)?;
    let user = serde_json::to_value(user).map_err(RenderError::Encode)?;
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": NAME,
        "clusters": [{"name": NAME, "cluster": cluster}],
        "users": [{"name": NAME, "user": user}],
        "contexts": [{"name": NAME, "context": context}],
    });
    Ok(kubeconfig.to_string())
}

/// Writes a kubeconfig into the folder `scratch`. Only this process's user can read the file, as it contains
/// credentials. Dropping the path removes the file.
pub fn write_kubeconfig(scratch: &Path, yaml: &str) -> std::io::Result<TempPath> {
    let mut file = tempfile::Builder::new()
        .prefix("kubeconfig-")
        .tempfile_in(scratch)?;
    file.write_all(yaml.as_bytes())?;
    Ok(file.into_temp_path())
}

fn with_inline_files(mut user: AuthInfo) -> Result<AuthInfo, RenderError> {
    if let Some(path) = user.client_certificate.take()
        && user.client_certificate_data.is_none()
    {
        user.client_certificate_data = Some(base64(read(path)?));
    }
    if let Some(path) = user.client_key.take()
        && user.client_key_data.is_none()
    {
        user.client_key_data = Some(base64(read(path)?).into());
    }
    Ok(user)
}

fn read(path: String) -> Result<Vec<u8>, RenderError> {
    std::fs::read(&path).map_err(|source| RenderError::Read {
        path: path.into(),
        source,
    })
}

/// Encodes DER certificates as PEM.
pub fn pem(certificates: &[impl AsRef<[u8]>]) -> String {
    let mut text = String::new();
    for certificate in certificates {
        text.push_str("-----BEGIN CERTIFICATE-----\n");
        let encoded: Vec<char> = base64(certificate.as_ref().to_vec()).chars().collect();
        for line in encoded.chunks(PEM_LINE) {
            text.extend(line);
            text.push('\n');
        }
        text.push_str("-----END CERTIFICATE-----\n");
    }
    text
}

/// Encodes bytes with Kubernetes' own byte string, which is base64 in JSON.
fn base64(bytes: Vec<u8>) -> String {
    match serde_json::to_value(ByteString(bytes)) {
        Ok(serde_json::Value::String(text)) => text,
        _ => unreachable!("a ByteString is written as a JSON string"),
    }
}

#[cfg(test)]
mod tests {
    use kube::config::{KubeConfigOptions, Kubeconfig};
    use serde_json::Value;

    use super::*;

    const TOKEN: &str = "hunter2";

    fn rendered(config: &Config) -> Value {
        serde_json::from_str(&kubeconfig_yaml(config, None).unwrap()).unwrap()
    }

    #[tokio::test]
    async fn in_cluster_kubeconfig_keeps_token_file_and_ca() {
        let certificates = vec![vec![7; 100], vec![8; 3]];
        let mut config = Config::new("https://10.0.0.1".parse().unwrap());
        config.root_cert = Some(certificates.clone());
        config.root_cert_file = Some("/var/run/secrets/ca.crt".into());
        config.auth_info = AuthInfo {
            token_file: Some("/var/run/secrets/token".to_owned()),
            ..Default::default()
        };
        let text = kubeconfig_yaml(&config, None).unwrap();
        let kubeconfig = rendered(&config);
        assert_eq!(
            kubeconfig["users"][0]["user"],
            json!({"tokenFile": "/var/run/secrets/token"})
        );
        assert!(
            kubeconfig["clusters"][0]["cluster"]
                .get("insecure-skip-tls-verify")
                .is_none(),
            "{kubeconfig}"
        );

        let parsed = Kubeconfig::from_yaml(&text).unwrap();
        let parsed = Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default())
            .await
            .unwrap();
        assert_eq!(parsed.root_cert, Some(certificates));
        assert_eq!(parsed.cluster_url, config.cluster_url);
        assert_eq!(parsed.default_namespace, "default");
    }

    #[test]
    fn helm_impersonates_service_account_with_own_credential() {
        let mut config = Config::new("https://a".parse().unwrap());
        config.auth_info = AuthInfo {
            token: Some(TOKEN.into()),
            impersonate_groups: Some(vec!["system:masters".to_owned()]),
            ..Default::default()
        };
        let account = ServiceAccount::parse("helm", "krypton").unwrap();
        let text = kubeconfig_yaml(&config, Some(&account)).unwrap();
        let kubeconfig: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            kubeconfig["users"][0]["user"],
            json!({"token": TOKEN, "as": "system:serviceaccount:krypton:helm"})
        );
    }

    #[test]
    fn helm_goes_by_the_same_proxy() {
        let mut config = Config::new("https://a".parse().unwrap());
        config.proxy_url = Some("socks5://p:1080".parse().unwrap());
        let kubeconfig = rendered(&config);
        assert_eq!(
            kubeconfig["clusters"][0]["cluster"]["proxy-url"],
            "socks5://p:1080/"
        );
    }

    #[test]
    fn insecure_source_disables_tls_verification_and_drops_ca() {
        let mut config = Config::new("https://a".parse().unwrap());
        config.accept_invalid_certs = true;
        config.root_cert = Some(vec![vec![1]]);
        config.auth_info = AuthInfo {
            token: Some(TOKEN.into()),
            ..Default::default()
        };
        let kubeconfig = rendered(&config);
        let expected = json!({"server": "https://a/", "insecure-skip-tls-verify": true});
        assert_eq!(kubeconfig["clusters"][0]["cluster"], expected);
        assert_eq!(kubeconfig["users"][0]["user"], json!({ "token": TOKEN }));
    }
}
