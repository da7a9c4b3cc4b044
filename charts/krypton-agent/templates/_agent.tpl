{{- define "krypton-agent.joinSecret" -}}
{{- default .Values.join.secretName .Values.join.existingSecret }}
{{- end }}

{{- define "krypton-agent.args" -}}
{{- $args := list }}
{{- if .Values.populateArgs }}
{{- $args = append $args (printf "--join-secret=%s" (include "krypton-agent.joinSecret" .)) }}
{{- with .Values.hub }}
{{- $args = append $args (printf "--hub=%s" (join "," .)) }}
{{- end }}
{{- if include "krypton.helmAccountName" . }}
{{- $args = append $args (printf "--helm-service-account=%s/%s" (include "krypton.helmAccountNamespace" .) (include "krypton.helmAccountName" .)) }}
{{- end }}
{{- $args = concat $args (include "krypton.commonArgs" . | fromJsonArray) }}
{{- end }}
{{- with concat $args .Values.extraArgs }}
{{- toYaml . }}
{{- end }}
{{- end }}
